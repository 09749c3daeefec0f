"""Other batches than the one that was compiled: of the data source, or made of the example."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.precision import STORED, inputs_in
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
            if any(inputs[name].shape[1:] != one.shape[1:] for name, one in example.items()):
                return
            yield inputs_in(STORED[options.dtype], inputs)


def made_batches(example: Batch, number: int) -> Iterator[Batch]:
    """Batches of the kind of `example`, with smaller floating-point numbers: its elements in another order, in odd
    batches some of them several times; its samples in another order; all in its order. `number` counts from 0."""

    def rolled(one: Tensor) -> Tensor:
        if number % 2 and one.numel():
            chosen = torch.randint(one.numel(), (one.numel(),), generator=torch.Generator().manual_seed(number))
            return one.reshape(-1)[chosen].reshape(one.shape)
        return one.reshape(-1).roll(1 + number * (1 + one.numel() // 7)).reshape(one.shape)

    def of_samples(one: Tensor) -> Tensor:
        return one.roll(1 + number, 0) if one.ndim else one

    yield _each(example, rolled, number)
    yield _each(example, of_samples, number)
    yield _each(example, lambda one: one, number)


def _each(example: Batch, change: Callable[[Tensor], Tensor], number: int) -> Batch:
    scale = _SHRUNK ** (1 + number % _SCALES)

    def changed(one: Tensor) -> Tensor:
        other = change(one.detach())
        other = other * scale if one.is_floating_point() else other.clone()
        return other.requires_grad_(one.requires_grad)

    with torch.no_grad():
        return {name: changed(one) for name, one in example.items()}


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def parts(batch: Batch, count: int) -> Sequence[Batch]:
    """`batch` in `count` parts of as many samples."""
    chunks = {name: one.chunk(count) for name, one in batch.items()}
    return [{name: of[index].contiguous() for name, of in chunks.items()} for index in range(count)]
