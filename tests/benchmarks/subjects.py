"""What forward and backward are measured on: a GPT, which is arithmetic, and a step that is all overhead."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.char_gpt import ALPHABET, CharGPT

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, a batch of its inputs by name, and its loss. `loss` names one of PyTorch's; without one, the
    model returns its loss first. `passes` are timed together."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: str | None
    passes: int

    def loss_of(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The loss of `model` on `inputs`, in eager PyTorch."""
        if self.loss is None:
            loss: Tensor = model(*inputs.values())[0]
            return loss
        *given, target = inputs.values()
        return F.cross_entropy(model(*given), target)


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    return CharGPT(layers=6, heads=6, width=384, length=128)


def _windows() -> Inputs:
    windows = torch.randint(0, len(ALPHABET), (2, 129), generator=torch.Generator().manual_seed(1))
    return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def _logistic_regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(784, 10)


def _image() -> Inputs:
    return {"input": torch.randn(1, 784, generator=torch.Generator().manual_seed(1)), "target": torch.tensor([3])}


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("gpt", _gpt, _windows, None, passes=1),
        Subject("logistic_regression", _logistic_regression, _image, "cross_entropy", passes=2000),
    )
}
