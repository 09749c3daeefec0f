"""The logistic regression app: SGD with momentum, in the smallest app there is."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.apps import plain
from tests.apps.support import App, Example, ExampleTests
from tests.support.whole import whole


class TestLogisticRegression(ExampleTests):
    example = Example(
        "logistic_regression",
        batch_size=32,
        rounds=2,
        save=("--checkpoint", "weights.pt"),
        saved="weights.pt",
        told=r"held out: accuracy [89]\d",
    )
    few_steps = replace(example, batch_size=240, rounds=1, told="held out")
    near_weight = 3e-3

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(256)
        return plain.train(
            module.LogReg(),
            module.FlatDigits(module.digits()[0]),
            replicas,
            epochs=app.example.rounds,
            batch_size=app.example.batch_size,
            optimizer=lambda flats: torch.optim.SGD(flats, lr=0.1, momentum=0.9, fused=True),
        )

    @whole
    def test_replicas_are_measured_together(self, app: App) -> None:
        flags = ("--data-parallel", "--num-iterations", "5", "--json")
        result = app.call("measure-performance", *flags, np=2)
        assert result.stdout.count("\n") == 1
        assert '"replicas": 2, "batch_size": 32, "steps": 5' in result.stdout

    def test_another_batch_size_is_another_graph(self, app: App) -> None:
        result = app.call("run", "-b", "16", check=False)
        assert result.returncode == 3
        assert (
            "error[pef]: the PEF logistic_regression was compiled from another graph: image is input float32[32, 64]"
        ) in result.stderr
