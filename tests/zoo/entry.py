"""An entry of the zoo: a model that people train, at a tiny size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = dict[str, Tensor]
"""By name of the model's input, with the samples along dimension 0. Of a `loss`, `target` is the last."""

TARGET = "target"


@dataclass(frozen=True, slots=True)
class Entry:
    """`build`: makes the model; `make_batch`: so many samples from a generator; `loss`: a function of
    torch.nn.functional, or None if the model returns its own; `refused`: the code of the error, if it is refused."""

    name: str
    package: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    loss: str | None = None
    refused: str = ""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def batch(self, samples: int) -> Batch:
        return self.make_batch(samples, torch.Generator().manual_seed(1))
