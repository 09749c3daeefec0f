"""What a case of the zoo is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch: TypeAlias = dict[str, Tensor]
"""Tensors by name, with the samples along dimension 0. Where the case names a loss, the last one is the loss's target,
and the others are bound to the inputs of `forward` by position."""

Make: TypeAlias = Callable[[int, torch.Generator], Tensor]
"""So many samples from a generator."""

MakeBatch: TypeAlias = Callable[[int, torch.Generator], Batch]


def numbers(*shape: int) -> Make:
    return lambda samples, generator: torch.randn(samples, *shape, generator=generator)


def shares(*shape: int) -> Make:
    return lambda samples, generator: torch.rand(samples, *shape, generator=generator)


def integers(below: int, *shape: int) -> Make:
    return lambda samples, generator: torch.randint(below, (samples, *shape), generator=generator)


def by_name(**parts: Make) -> MakeBatch:
    return lambda samples, generator: {name: make(samples, generator) for name, make in parts.items()}


Outcome = Literal["exact", "close", "refused", "wrong", "failed"]
"""Losses with the bits of eager PyTorch, or close to them, or an error at compile with a rewrite. Never should there be
other losses, or another error."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model at a tiny size. `build`: a class or function of a module without arguments; `make_batch`: so many samples
    from a generator; `loss`: its name, or None if the model returns its own; `note`: what the case shows; `unused`: the
    parameters that get no gradient; `expected`: what becomes of it; `package`: where the model is from."""

    name: str
    build: Callable[[], nn.Module]
    make_batch: MakeBatch
    loss: str | None = None
    note: str = ""
    unused: tuple[str, ...] = ()
    expected: Outcome = "exact"
    package: str = ""

    def module(self, seed: int = 0) -> nn.Module:
        """The model in training mode, with the same weights for the same seed; torch's own generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().train()

    def batch(self, batch_size: int, seed: int = 0) -> Batch:
        """`batch_size` samples that depend on nothing but the seed: give each rank its own."""
        return self.make_batch(batch_size, torch.Generator().manual_seed(seed))


def evaluate_loss(case: Case, module: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of `batch` in eager PyTorch: the model's own first output, or the loss that the case names."""
    if case.loss is None:
        return _first(module(**batch))
    *inputs, target = batch.values()
    return NAMED_LOSSES[case.loss](_first(module(*inputs)), target)


NAMED_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
}


def _first(result: Any) -> Tensor:
    """The first tensor of what a model returns: a tensor, a tuple, a dataclass, or a mapping as in `transformers`."""
    while not isinstance(result, Tensor):
        parts = result if isinstance(result, Mapping | tuple | list) else vars(result)
        result = next(iter(parts.values() if isinstance(parts, Mapping) else parts))
    return result
