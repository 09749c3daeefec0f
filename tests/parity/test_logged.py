"""Scalars beside the loss, and several targets: their means are those of an eager loop over all samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import sambasim as ss
from sambasim.api.given import data_of
from sambasim.errors import ModelError
from tests.support.whole import whole_case

SAMPLES, HELD_OUT = 16, 7


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.numbers, self.classes = nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        numbers = self.numbers(x)
        return {"numbers": numbers, "classes": self.classes(x), "size": numbers.abs().mean()}


class Parts(NamedTuple):
    loss: Tensor
    parts: dict[str, Tensor]


def named(result: dict[str, Tensor], targets: Any) -> Parts:
    numbers, classes = targets.values() if isinstance(targets, dict) else targets
    right = result["classes"].argmax(1).eq(classes).sum()
    of_numbers = mse_loss(result["numbers"], numbers)
    return Parts(of_numbers + cross_entropy(result["classes"], classes), {"mse": of_numbers, "right": right})


def summed(result: dict[str, Tensor], numbers: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = cross_entropy(result["classes"], classes, reduction="sum")
    return total, torch.tensor(float(len(numbers))), {"total": total.detach()}


class Pairs(torch.utils.data.Dataset[object]):
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> object:
        x, numbers, classes = (tensor[index] for tensor in self.tensors)
        return x, (numbers, classes)


def by_name(*tensors: Tensor) -> dict[str, Tensor]:
    return dict(zip(("x", "numbers", "classes"), tensors, strict=True))


DATA: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "a nested target": (named, lambda x, *targets: (x, targets), Pairs),
    "targets by name": (named, by_name, lambda *tensors: data_of(by_name(*tensors))),
    "a sum, targets side by side": (summed, lambda *tensors: tensors, TensorDataset),
}


@pytest.mark.parametrize("kind", ["a nested target", *map(whole_case, [*DATA][1:])])
@pytest.mark.usefixtures("one_thread")
def test_means_over_all_samples(kind: str, tmp_path: Path) -> None:
    loss, example, data = DATA[kind]
    drawn = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(SAMPLES + HELD_OUT, 5, generator=drawn),
        torch.randn(SAMPLES + HELD_OUT, 2, generator=drawn),
        torch.randint(3, (SAMPLES + HELD_OUT,), generator=drawn),
    ]
    pef = ss.compile(Two(), example(*(one[:4] for one in tensors)), loss=loss, optimizer="sgd", lr=0.0,
                     data_parallel=True, quiet=True, check=0, output_folder=tmp_path)  # fmt: skip
    both = data(*(one[:SAMPLES] for one in tensors)), data(*(one[SAMPLES:] for one in tensors))
    run = ss.run(pef, both, replicas=2, grad_accumulation_steps=2, steps=1, threads=1, quiet=True)

    def wanted(begin: int, end: int, size: int) -> dict[str, float]:
        """Means over the samples of a batch at a time; what counts, over batches."""
        found: dict[str, list[float]] = {}
        for start in range(begin, end, size):
            x, *targets = (one[start : start + size] for one in tensors)
            with torch.no_grad():
                result = Two()(x)
                returned: Any = loss(result, *targets) if loss is summed else loss(result, targets)
            scalars = {"loss": returned[0] / (len(x) if loss is summed else 1), **returned[-1], "size": result["size"]}
            for name, value in scalars.items():
                found.setdefault(name.replace("mse", "parts.mse").replace("right", "parts.right"), []).append(
                    float(value)
                )
        return {name: sum(values) / len(values) for name, values in found.items()}

    expected = wanted(0, SAMPLES, 4)
    assert {name: values[0] for name, values in run.logged.items()} | {"loss": run.losses[0]} == pytest.approx(expected)
    whole, rest, (evaluation,) = wanted(SAMPLES, SAMPLES + 4, 4), wanted(SAMPLES + 4, SAMPLES + 7, 1), run.evaluations
    means = {name: (4 * whole[name] + 3 * rest[name]) / 7 for name in whole}
    assert {**evaluation.logged, "loss": evaluation.loss} == pytest.approx(means)


def test_a_loss_function_without_a_loss_is_refused() -> None:
    example = torch.ones(2, 5), torch.ones(2, 2)
    with pytest.raises(ModelError, match="returns a dict, not a tensor"):
        ss.compile(Two(), example, loss=lambda result, target: {"mse": result["size"]}, optimizer="sgd", quiet=True)
