"""The LeNet app: checkpoints that training goes on from, and inference by a PEF of its own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.apps import plain
from tests.apps.support import App, Example, ExampleTests, differences
from tests.support.whole import whole

EPOCHS, BATCH = 2, 36
SAVED = f"checkpoints/epoch_{EPOCHS}.pt"


@pytest.fixture(scope="class")
def told(app: App) -> list[str]:
    """Trained on two replicas, with a checkpoint of each epoch in `trained`: the lines that it printed."""
    flags = ("--data-parallel", *app.example.training, "--save-folder", "trained")
    return app.call("run", *flags, np=2).stdout.splitlines()


@whole
class TestLeNet(ExampleTests):
    example = Example(
        "lenet",
        batch_size=BATCH,
        rounds=EPOCHS,
        save=("--save-folder", "checkpoints"),
        saved=SAVED,
        told=r"held out: \d+ of 360 right",
    )
    # At the example's own rate, half of what a step changes is less than bf16 can add to a weight.
    few_steps = replace(
        example, batch_size=120, rounds=1, train=("--lr", "0.5"), saved="checkpoints/epoch_1.pt", told="held out"
    )
    near_weight = 2e-2  # of two values that are nearly equal, max pooling takes the other after rounding

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        rate = float(app.example.train[1]) if app.example.train else 0.05
        torch.manual_seed(256)
        return plain.train(
            module.LeNet(),
            module.enlarged(module.digits()[0]),
            replicas,
            epochs=app.example.rounds,
            batch_size=app.example.batch_size,
            optimizer=lambda flats: torch.optim.SGD(flats, lr=rate, momentum=0.9, fused=True),
        )

    def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended(self, app: App, told: list[str]) -> None:
        """And with the other sync, on which bits do not depend."""
        flags = ("--data-parallel", "--reduce-on-rdu", "--resume", "trained/epoch_1.pt", "--save-folder", "resumed")
        result = app.call("run", *self.example.training, *flags, np=2)
        assert result.stdout.splitlines() == told[1:]
        resumed, straight = (torch.load(app.folder / name / f"epoch_{EPOCHS}.pt") for name in ("resumed", "trained"))
        assert differences(resumed["model"], straight["model"]) == []
        of_resumed, of_straight = (_momenta(checkpoint["optimizer"]) for checkpoint in (resumed, straight))
        assert differences(of_resumed, of_straight) == []

    def test_an_inference_pef_reads_what_training_learned(self, app: App, told: list[str]) -> None:
        app.compile("--inference", pef="lenet_inference")
        flags = ("--inference", "--resume", f"trained/epoch_{EPOCHS}.pt")
        inferred = app.call("run", *flags, pef="lenet_inference")
        assert inferred.stdout == f"{told[-1]}\n"
        first, last = (float(line.split()[-1]) for line in told[:-1])
        assert last < first, "the loss of the epochs"
        agreed = app.call("test", "--inference", pef="lenet_inference")
        assert agreed.stdout == "device and host agree\n"


def _momenta(optimizer: dict[str, dict[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    return {str(index): state["momentum_buffer"] for index, state in optimizer["state"].items()}
