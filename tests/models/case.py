"""What a case of the model zoo is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 5

Batch: TypeAlias = "tuple[Tensor, ...] | dict[str, Tensor]"
"""Tensors with the samples along dimension 0: bound to the inputs of `forward` by position, or by name (then the model
returns its own loss). Where the case names a loss, the last one is the loss's target."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model family, small enough to be captured in a second or two.

    `build` is a class or function of a module without arguments, `note` what the case shows, `unused` the parameters
    that get no gradient. Gradients of `zero_gradients` are zero but for rounding: a bias before a normalization, or a
    key bias. `exact` is False where capture may differ from eager PyTorch in the last bits.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    loss: str | None
    note: str
    unused: tuple[str, ...] = ()
    zero_gradients: tuple[str, ...] = ()
    exact: bool = True

    @property
    def target(self) -> str:
        """`package.module:name` of the model."""
        return f"{self.build.__module__}:{self.build.__qualname__}"

    def module(self, seed: int = 0) -> nn.Module:
        """The model in training mode, with the same weights for the same seed; torch's own generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def batch(self, batch_size: int, seed: int = 0) -> Batch:
        """`batch_size` samples that depend on nothing but the seed: give each rank its own."""
        return self.make_batch(batch_size, torch.Generator().manual_seed(seed))


def evaluate_loss(case: Case, module: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of `batch` in eager PyTorch: the model's own first output, or the loss that the case names."""
    if isinstance(batch, dict):
        return _first(module(**batch))
    if case.loss is None:
        return _first(module(*batch))
    *inputs, target = batch
    return NAMED_LOSSES[case.loss](_first(module(*inputs)), target)


NAMED_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
}


def _first(result: object) -> Tensor:
    """The first tensor of what a model returns: a tensor, a tuple, or a mapping as in `transformers`."""
    if isinstance(result, Mapping):
        return _first(next(iter(result.values())))
    if isinstance(result, tuple):
        return _first(result[0])
    if not isinstance(result, Tensor):
        raise TypeError(f"a model returned {type(result).__name__}")
    return result
