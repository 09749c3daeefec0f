"""Other batches than the one that was compiled: of the data source, or made of the example."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.tensors import STORED, inputs_in
from sambasim.compiler.front import inputs_of
from sambasim.data.batches import collate
from sambasim.data.sources import Source
from sambasim.errors import SambasimError
from sambasim.options.compile import CompileOptions

Batch: TypeAlias = Mapping[str, Tensor]

_SHRUNK = 0.75
"""By which the numbers of an example are multiplied: they stay in any range that has zero in it."""

_SCALES = 8


def read_batches(
    source: Source, model: nn.Module, options: CompileOptions, example: Batch, first: int
) -> Iterator[Batch]:
    """The batches of a replica in the data, from number `first`, as far as samples have the shapes of `example`."""
    loss = options.loss.name if options.loss else None
    size = options.training.batch_size
    with suppress(SambasimError):
        for start in range(first * size, len(source.train) - size + 1, size):
            batch = collate(source.train.__getitems__(range(start, start + size)))
            inputs = inputs_of(batch, model, loss, inference=options.inference).inputs
            if any(inputs[name].shape[1:] != tensor.shape[1:] for name, tensor in example.items()):
                return
            yield inputs_in(STORED[options.dtype], inputs)


def made_batches(example: Batch, number: int) -> Iterator[Batch]:
    """Batches of the kind of `example`, with smaller floating-point numbers: its elements in another order, in odd
    batches some of them several times; its samples in another order; all in its order. `number` counts from 0."""

    def rolled(tensor: Tensor) -> Tensor:
        if number % 2 and tensor.numel():
            chosen = torch.randint(tensor.numel(), (tensor.numel(),), generator=torch.Generator().manual_seed(number))
            return tensor.reshape(-1)[chosen].reshape(tensor.shape)
        return tensor.reshape(-1).roll(1 + number * (1 + tensor.numel() // 7)).reshape(tensor.shape)

    def of_samples(tensor: Tensor) -> Tensor:
        return tensor.roll(1 + number, 0) if tensor.ndim else tensor

    yield _each(example, rolled, number)
    yield _each(example, of_samples, number)
    yield _each(example, lambda tensor: tensor, number)


def _each(example: Batch, change: Callable[[Tensor], Tensor], number: int) -> Batch:
    scale = _SHRUNK ** (1 + number % _SCALES)

    def changed(tensor: Tensor) -> Tensor:
        other = change(tensor.detach())
        other = other * scale if tensor.is_floating_point() else other.clone()
        return other.requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return {name: changed(tensor) for name, tensor in example.items()}


def equal(batch: Batch, other: Batch) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in batch.items())


def parts(batch: Batch, count: int) -> Sequence[Batch]:
    """`batch` in `count` parts of as many samples."""
    chunks = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: of[index].contiguous() for name, of in chunks.items()} for index in range(count)]
