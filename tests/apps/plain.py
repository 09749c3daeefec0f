"""Plain PyTorch in which one process plays all replicas: what the weights of a data parallel app must be, bit for bit.

Most apps train as `train` does; those with several optimizers and a schedule as `train_steps` does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ALIGNMENT_ELEMENTS = 64

MakeOptimizer: TypeAlias = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class PaddedOptimizer:
    """A fused optimizer over parameters, each laid out as in a PEF: flat, padded with zeros to a multiple of 64."""

    def __init__(self, parameters: Sequence[nn.Parameter], make: MakeOptimizer) -> None:
        self.parameters = list(parameters)
        self._flats = [nn.Parameter(_padded(parameter.detach())) for parameter in self.parameters]
        self.optimizer = make(self._flats)

    def step(self, gradients: Sequence[Tensor]) -> None:
        for flat, gradient in zip(self._flats, gradients, strict=True):
            flat.grad = _padded(gradient)
        self.optimizer.step()
        for flat, parameter in zip(self._flats, self.parameters, strict=True):
            parameter.data.copy_(flat.detach()[: parameter.numel()].view_as(parameter))


class WideSGD:
    """torch's fused SGD in float32, on parameters and momenta that are rounded to bf16 after each step; padded as in
    `PaddedOptimizer`."""

    def __init__(self, parameters: Sequence[nn.Parameter], **options: Any) -> None:
        self.parameters, self._options = parameters, options
        self._momenta: list[Tensor | None] = [None] * len(parameters)

    def step(self, gradients: Sequence[Tensor]) -> None:
        for number, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            padding = (0, -parameter.numel() % ALIGNMENT_ELEMENTS)
            wide = nn.Parameter(nn.functional.pad(parameter.detach().flatten(), padding).float())
            wide.grad = nn.functional.pad(gradient.flatten(), padding).float()
            optimizer = torch.optim.SGD([wide], fused=True, **self._options)
            momentum = self._momenta[number]
            if momentum is not None:
                optimizer.state[wide]["momentum_buffer"] = momentum.float()
            optimizer.step()
            self._momenta[number] = optimizer.state[wide]["momentum_buffer"].bfloat16()
            parameter.data.copy_(wide.detach()[: parameter.numel()].view_as(parameter))


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
    data: Dataset[Any],
    replicas: int,
    *,
    epochs: int,
    batch_size: int,
    optimizer: MakeOptimizer,
    max_grad_norm: float | None = None,
    begin: Callable[[int], object] | None = None,
) -> dict[str, Tensor]:
    """The state of `model` after `epochs` epochs of `data`, sharded by a DistributedSampler. It is trained in place.

    data: its samples are tuples, which `model` takes as its arguments; the first that it returns is the loss
    optimizer: as for PaddedOptimizer
    max_grad_norm: what gradients are clipped to
    begin: called once as each replica, with its rank, before the first epoch: where an app seeds each rank for itself
    """
    padded = PaddedOptimizer(list(model.parameters()), optimizer)
    states = [torch.get_rng_state()] * replicas  # each replica draws the random numbers that it would draw alone

    @contextmanager
    def as_replica(rank: int) -> Iterator[None]:
        torch.set_rng_state(states[rank])
        yield
        states[rank] = torch.get_rng_state()

    for rank in range(replicas):
        with as_replica(rank):
            if begin is not None:
                begin(rank)
    for epoch in range(epochs):
        loaders = []
        for rank in range(replicas):
            with as_replica(rank):
                loaders.append(iter(_loader(data, replicas, rank, epoch, batch_size)))
        for of_replicas in zip(*loaders, strict=True):
            gradients = []
            for rank, batch in enumerate(of_replicas):
                with as_replica(rank):
                    gradients.append(torch.autograd.grad(model(*batch)[0].mean(), padded.parameters))
            averaged = mean(gradients)
            if max_grad_norm is not None:
                clip(averaged, max_grad_norm)
            padded.step(averaged)
    return dict(model.state_dict())


def batches(data: Dataset[Any], replicas: int, rank: int, batch_size: int) -> Iterator[list[Tensor]]:
    """The batches of one replica, epoch after epoch."""
    for epoch in count():
        yield from _loader(data, replicas, rank, epoch, batch_size)


def train_steps(
    model: nn.Module,
    optimizers: Sequence[PaddedOptimizer],
    steps: int,
    *,
    gradients: Callable[[int], Sequence[Sequence[Tensor]]],
    rate: Callable[[int], float],
    max_grad_norm: float,
) -> dict[str, Tensor]:
    """The state of `model` after so many steps with several optimizers and a schedule. Some steps must clip."""
    norms = []
    for step in range(steps):
        averaged = mean(gradients(step))
        norms.append(nn.utils.get_total_norm(averaged).item())
        clip(averaged, max_grad_norm)
        of_parameters = dict(zip(model.parameters(), averaged, strict=True))
        for padded in optimizers:
            padded.optimizer.param_groups[0]["lr"] = rate(step)
            padded.step([of_parameters[parameter] for parameter in padded.parameters])
    assert not norms or max(norms) > max_grad_norm
    return dict(model.state_dict())


def _loader(data: Dataset[Any], replicas: int, rank: int, epoch: int, batch_size: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, rank)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=True)


def _padded(tensor: Tensor) -> Tensor:
    return nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % ALIGNMENT_ELEMENTS))


def _tree_sum(leaves: Sequence[Tensor]) -> Tensor:
    """Neighbours are added, then neighbours of the sums; what has no neighbour goes up as it is."""
    while len(leaves) > 1:
        pairs = [first + second for first, second in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]
