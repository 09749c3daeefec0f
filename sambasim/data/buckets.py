"""Samples of several lengths, where a PEF has a graph for each of a few: batches are padded to the next of these.

A length is that of the first axis of a sample, and so of the second axis of a batch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from sambasim.data.batches import collate, each_value
from sambasim.data.datasets import Collate, Padding
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec


def resized(tensor: Tensor, length: int, value: float = 0) -> Tensor:
    """A batch of samples of `length`: cut, or padded with `value`."""
    missing = max(0, length - tensor.shape[1])
    return F.pad(tensor[:, :length], (*(0,) * 2 * (tensor.ndim - 2), 0, missing), value=value)


def of_length(batch: Any, length: int, padding: Mapping[str, float]) -> Any:
    """`batch` with samples of `length`: of all tensors that have the length which most of them have now."""
    lengths = Counter[int]()
    each_value(batch, lambda value, _: lengths.update(value.shape[1:2] if isinstance(value, Tensor) else ()))
    if not lengths:
        what = "data.buckets are lengths of samples, and these are single numbers"
        raise DataError(what, remedy="leave out data.buckets")
    ((now, _),) = lengths.most_common(1)

    def change(value: Any, name: str) -> Any:
        is_long = isinstance(value, Tensor) and value.shape[1:2] == (now,)
        return resized(value, length, padding.get(name.removeprefix("."), 0)) if is_long else value

    return each_value(batch, change)


@dataclass(frozen=True)
class Fitted:
    """A collate function: as `function`, with samples of `length`."""

    function: Collate | Padding | None
    length: int
    padding: Mapping[str, float]

    def __call__(self, samples: list[Any]) -> Any:
        batch = collate(samples, self.function)
        return batch if isinstance(batch, DataError) else of_length(batch, self.length, self.padding)


@dataclass(frozen=True)
class Shapes:
    """The inputs of each graph of a PEF, in order of their lengths. `padding`: by input, what fills it up."""

    inputs: Sequence[Sequence[InputSpec]]
    padding: Mapping[str, float]

    def first_for(self, batch: Mapping[str, Tensor]) -> int:
        """The number of the first graph that `batch` fits into; that of the last one if none does."""
        for number, specs in enumerate(self.inputs):
            if all(batch[spec.name].shape[1:2] <= spec.shape[:1] for spec in specs):
                return number
        return len(self.inputs) - 1

    def padded(self, batch: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
        """`batch` as graph `number` takes it, where it is shorter."""
        lengths = {
            spec.name: spec.shape[0]
            for spec, shortest, longest in zip(self.inputs[number], self.inputs[0], self.inputs[-1], strict=True)
            if shortest.shape != longest.shape
        }
        return {
            name: resized(tensor, lengths[name], self.padding.get(name, 0))
            if name in lengths and tensor.shape[1:2] < (lengths[name],)
            else tensor
            for name, tensor in batch.items()
        }
