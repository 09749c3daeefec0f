"""An entry of the zoo: a model that people train, at a tiny size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = dict[str, Tensor]
"""By name of the model's input, with the samples along dimension 0. Of a `loss`, `target` is the last."""

TARGET = "target"

Outcome = Literal["exact", "close", "refused", "wrong", "failed"]
"""Losses with the bits of eager PyTorch, or close to them, or an error at compile with a rewrite. Never should there be
other losses, or another error."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`build`: makes the model; `make_batch`: so many samples from a generator; `loss`: a function of
    torch.nn.functional, or None if the model returns its own; `expected`: what becomes of it; `note`: what is
    particular."""

    name: str
    package: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    loss: str | None = None
    expected: Outcome = "exact"
    note: str = ""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def batch(self, samples: int) -> Batch:
        return self.make_batch(samples, torch.Generator().manual_seed(1))
