"""Plain PyTorch in which one process plays all replicas: what weights of a data parallel app must be, bit for bit."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

T = TypeVar("T")

MakeOptimizer: TypeAlias = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def mean(of_replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of each parameter the mean of its gradients: the sum by the balanced binary tree over ranks, divided."""
    return [_tree_sum(gradients) / len(gradients) for gradients in zip(*of_replicas, strict=True)]


def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """What torch.nn.utils.clip_grad_norm_ does, with squares that are added in float64."""
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        for gradient in gradients:
            gradient.mul_(scale)


def train(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    data: Dataset[Any],
    replicas: int,
    *,
    batch_size: int,
    epochs: int = 0,
    steps: int = 0,
    micro_steps: int = 1,
    begin: Callable[[int], object] = lambda rank: None,
    before: Callable[[int, int], object] = lambda step, rank: None,
    rate: Callable[[int], float] | None = None,
    max_grad_norm: float | None = None,
) -> dict[str, Tensor]:
    """The state of `model`, which is trained in place, with the random numbers that each replica would draw alone.

    data: its samples are the arguments of `model`, whose first output is the loss
    epochs, steps: how long, by one of them; micro_steps: the batches of a step, whose mean loss counts
    begin: called once as each replica, with its rank: where an app seeds each rank for itself
    before: called as a replica with the step and its rank, between taking a batch and computing its gradients
    rate: of a step, for all optimizers
    max_grad_norm: what gradients are clipped to; some steps must clip"""
    states = [torch.get_rng_state()] * replicas
    shards = [_batches(data, replicas, rank, batch_size) for rank in range(replicas)]

    def as_replica(rank: int, work: Callable[[], T]) -> T:
        torch.set_rng_state(states[rank])
        result = work()
        states[rank] = torch.get_rng_state()
        return result

    def gradients(step: int, rank: int) -> list[Tensor]:
        model.zero_grad()
        for _ in range(micro_steps):
            batch = next(shards[rank])
            before(step, rank)
            (model(*batch)[0].mean() / micro_steps).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for rank in range(replicas):
        as_replica(rank, partial(begin, rank))
    norms = [0.0]
    for step in range(steps or epochs * len(_loader(data, replicas, 0, 0, batch_size))):
        averaged = mean([as_replica(rank, partial(gradients, step, rank)) for rank in range(replicas)])
        norms.append(nn.utils.get_total_norm(averaged).item())
        if max_grad_norm is not None:
            clip(averaged, max_grad_norm)
        for parameter, gradient in zip(model.parameters(), averaged, strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
    assert max_grad_norm is None or max(norms) > max_grad_norm
    return dict(model.state_dict())


def _batches(data: Dataset[Any], replicas: int, rank: int, batch_size: int) -> Iterator[list[Tensor]]:
    for epoch in count():
        yield from _loader(data, replicas, rank, epoch, batch_size)


def _loader(data: Dataset[Any], replicas: int, rank: int, epoch: int, batch_size: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, rank)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=True)


def _tree_sum(leaves: Sequence[Tensor]) -> Tensor:
    """Neighbours are added, then neighbours of the sums; what has no neighbour goes up as it is."""
    while len(leaves) > 1:
        pairs = [first + second for first, second in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]
