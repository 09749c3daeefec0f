"""Plain PyTorch in which one process plays all replicas: what the weights of a data parallel app must be, bit for bit.

Most apps train as `train` does, and say by its arguments how. An app with a loop of another kind writes its own of the
parts: `Replicas` gives each replica the random numbers that it would draw alone, `mean` is how gradients are averaged,
`clip` how they are clipped, and `PaddedOptimizer` updates the parameters.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ALIGNMENT_ELEMENTS = 64

MakeOptimizer: TypeAlias = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class PaddedOptimizer:
    """A fused optimizer over parameters, each laid out as in a PEF: flat, with zeros up to a multiple of 64 elements.

    A fused kernel goes through a tensor by whole vectors and rounds otherwise in the ragged tail; here no element of a
    parameter is in a tail. `make` is called with the flat tensors: `lambda flats: torch.optim.SGD(flats, lr=0.1,
    fused=True)`. Groups of parameters with options of their own have a PaddedOptimizer each.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], make: MakeOptimizer) -> None:
        self.parameters = list(parameters)
        self._flats = [nn.Parameter(_padded(parameter.detach())) for parameter in self.parameters]
        self.optimizer = make(self._flats)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update the parameters by these gradients, one for each."""
        for flat, gradient in zip(self._flats, gradients, strict=True):
            flat.grad = _padded(gradient)
        self.optimizer.step()
        for flat, parameter in zip(self._flats, self.parameters, strict=True):
            parameter.data.copy_(flat.detach()[: parameter.numel()].view_as(parameter))


class Replicas:
    """The streams of random numbers of several replicas, which all begin where this process's stream is."""

    def __init__(self, number: int) -> None:
        self._states = [torch.get_rng_state()] * number

    def __len__(self) -> int:
        return len(self._states)

    @contextmanager
    def playing(self, rank: int) -> Iterator[None]:
        """What is drawn inside is drawn by this replica."""
        torch.set_rng_state(self._states[rank])
        yield
        self._states[rank] = torch.get_rng_state()


def mean(of_replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of each parameter the mean of its gradients: the sum by the balanced binary tree over ranks, then one division.

    of_replicas: by rank, the gradients of all parameters
    """
    return [_tree_sum(gradients) / len(gradients) for gradients in zip(*of_replicas, strict=True)]


def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale `gradients` in place so that the norm of all together is at most `max_norm`.

    It is what torch.nn.utils.clip_grad_norm_ does, with squares that are added in float64.
    """
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
    played = Replicas(replicas)
    for rank in range(replicas):
        with played.playing(rank):
            if begin is not None:
                begin(rank)
    for epoch in range(epochs):
        batches = []
        for rank in range(replicas):
            sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, rank)
            sampler.set_epoch(epoch)
            loader: DataLoader[Any] = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
            with played.playing(rank):
                batches.append(iter(loader))
        for of_replicas in zip(*batches, strict=True):
            gradients = []
            for rank, batch in enumerate(of_replicas):
                with played.playing(rank):
                    gradients.append(torch.autograd.grad(model(*batch)[0].mean(), padded.parameters))
            averaged = mean(gradients)
            if max_grad_norm is not None:
                clip(averaged, max_grad_norm)
            padded.step(averaged)
    return dict(model.state_dict())


def _padded(tensor: Tensor) -> Tensor:
    return nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % ALIGNMENT_ELEMENTS))


def _tree_sum(leaves: Sequence[Tensor]) -> Tensor:
    """Neighbours are added, then neighbours of the sums; what has no neighbour goes up as it is."""
    while len(leaves) > 1:
        pairs = [first + second for first, second in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]
