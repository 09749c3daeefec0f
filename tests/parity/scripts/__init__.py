"""Whole training scripts, as people write them: each trains one model in plain PyTorch and in sambasim.

A script has `build()`, which makes the model with its optimizers and schedulers; `data()`, its samples;
`in_pytorch(replicas)`, a loop over whole batches of `BATCH` samples in one process; and `HOW`, what sambasim is told
beside, for a run in `RUN`. Random numbers are part of the samples, so that both see the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

BATCH, STEPS = 16, 12


class Trained(NamedTuple):
    losses: list[float]
    weights: Mapping[str, Tensor]
    averages: Mapping[str, Tensor] = {}
    scores: Sequence[float] = ()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {**self.weights, **{f"average of {name}": one for name, one in self.averages.items()}}


class Built(NamedTuple):
    model: nn.Module
    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]


class Script(Protocol):
    """`HOW`: of `compile`; `ACCUMULATED`: micro-batches of a step."""

    HOW: Mapping[str, Any]
    ACCUMULATED: int

    def build(self) -> Built: ...
    def data(self) -> tuple[Any, ...]: ...
    def in_pytorch(self, replicas: int) -> Trained: ...


def batches(*tensors: Tensor, first: int = 0, every: int = 1) -> Iterator[list[Tensor]]:
    """The samples of each step; those of replica `first` of `every`."""
    for step in range(STEPS):
        yield [tensor[step * BATCH : (step + 1) * BATCH][first::every] for tensor in tensors]


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
