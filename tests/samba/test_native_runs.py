"""What `sambasim run` trains of an app's PEF has the bits of PyTorch, also if momentum is turned on, off and on again
by the flags of runs that go on from checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sambasim as ss
from tests.samba.harness import BATCH, CLASSES, FEATURES, LogReg, Made, PefOf, batch_of, plain, seeded, with_sgd

pytestmark = pytest.mark.usefixtures("app")

ZEROS = "momentum of zeros has begun"
RUNS: dict[str, list[dict[str, float]]] = {
    "off, on": [{}, {"momentum": 0.9, "dampening": 0.5}, {}, {"momentum": 0.9, "dampening": 0.25}],
    "on, off, on": [{"momentum": 0.5, "dampening": 0.5}, {"lr": 0.2}, {"momentum": 0.9, "weight_decay": 0.1}],
    ZEROS: [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "dampening": 0.5}],
    "nesterov": [{"weight_decay": 0.5}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}],
}
"""What each run is given, beside `lr=0.1`; each takes a step more."""


class Unbiased(LogReg):
    """Inputs of zeros have gradients of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES, bias=False)


def _made() -> Made:
    return with_sgd(Unbiased)


def _data(replicas: int, steps: int) -> tuple[Tensor, Tensor]:
    generator, count = torch.Generator().manual_seed(0), replicas * steps * BATCH
    return torch.randn(count, FEATURES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def _eager(runs: list[dict[str, float]], data: tuple[Tensor, Tensor], replicas: int) -> dict[str, Tensor]:
    model = seeded(Unbiased)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    of_steps = zip(*(torch.split(part, replicas * BATCH) for part in data), strict=True)
    for given, (x, y) in zip(runs, of_steps, strict=True):
        start = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
        optimizer.param_groups[0].update({**start, **given})
        gradients = []
        for rank in range(replicas):
            optimizer.zero_grad()
            model(x[rank::replicas], y[rank::replicas])[0].backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(parts) / replicas
        optimizer.step()
    return {name: plain(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("row", RUNS)
def test_runs_turn_momentum_on_and_off(row: str, replicas: int, pef_of: PefOf, tmp_path: Path) -> None:
    runs = RUNS[row]
    pef = pef_of(_made, batch_of(), **({"data_parallel": True} if replicas > 1 else {}))
    data = _data(replicas, len(runs))
    if row == ZEROS:
        data[0][: replicas * BATCH] = 0.0
    options: dict[str, Any] = {"quiet": True, "threads": 1, "checkpoint_dir": tmp_path}
    options |= {"replicas": replicas} if replicas > 1 else {}
    for number, given in enumerate(runs, start=1):
        settings = {f"optimizer.{name}": value for name, value in given.items()} | {"data.shuffle": False}
        run = ss.run(pef, data, steps=number, set=settings, **options)
        options["resume"] = "newest"
    expected = _eager(runs, data, replicas)
    assert run.weights.keys() == expected.keys()
    assert all(torch.equal(run.weights[name], expected[name]) for name in expected)
