"""Samples of several lengths, where a PEF has a graph for each of a few: batches are padded to the next of these.

A length is that of the first axis of a sample, and so of the second axis of a batch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from sambasim.data.batches import collate, each_value
from sambasim.data.datasets import Collate, Padding
from sambasim.errors import DataError, OptionError
from sambasim.options.grammar import FLOAT_DTYPES, InputSpec
from sambasim.options.problem import nearest


def resized(tensor: Tensor, length: int, value: float = 0) -> Tensor:
    """A batch of samples of `length`: cut, or padded with `value`."""
    missing = max(0, length - tensor.shape[1])
    return F.pad(tensor[:, :length], (*(0,) * 2 * (tensor.ndim - 2), 0, missing), value=value)


def check_padding(padding: Mapping[str, float], inputs: Sequence[InputSpec]) -> None:
    """Raises OptionError for padding of what is no input, and by a fraction of integers."""
    dtypes = {spec.name: spec.dtype for spec in inputs}
    for name, value in padding.items():
        if name not in dtypes:
            what = f"data.padding.{name} is of no input: these are {', '.join(dtypes)}"
            near = f"data.padding.{nearest(name, dtypes) or inputs[0].name}={value:g}"
            raise OptionError(what, remedy=f"--set {near} --set data.padding.{name}=")
        if dtypes[name] not in FLOAT_DTYPES and value != int(value):
            what = f"data.padding.{name} = {value:g}, and the input is {dtypes[name]}"
            raise OptionError(what, remedy=f"--set data.padding.{name}={int(value)}")


def _too_long(what: str, length: int, lengths: Sequence[int]) -> DataError:
    what = f"{what} of length {length}, and the longest of data.buckets is {max(lengths)}"
    return DataError(what, remedy=f"cut them, or compile with --set 'data.buckets={[*sorted(lengths), length]}'")


def of_length(batch: Any, length: int, padding: Mapping[str, float], lengths: Sequence[int]) -> Any:
    """`batch` with samples of `length`, one of `lengths`: of all tensors that have the length which most of them have
    now. Raises DataError if that is longer than all."""
    counts = Counter[int]()
    each_value(batch, lambda value, _: counts.update(value.shape[1:2] if isinstance(value, Tensor) else ()))
    if not counts:
        what = "data.buckets are lengths of samples, and these are single numbers"
        raise DataError(what, remedy="leave out data.buckets")
    ((now, _),) = counts.most_common(1)
    if now > max(lengths):
        raise _too_long("samples are", now, lengths)

    def change(value: Any, name: str) -> Any:
        is_long = isinstance(value, Tensor) and value.shape[1:2] == (now,)
        return resized(value, length, padding.get(name.removeprefix("."), 0)) if is_long else value

    return each_value(batch, change)


@dataclass(frozen=True)
class Fitted:
    """A collate function: as `function`, and then `change`, as `of_length` does."""

    function: Collate | Padding | None
    change: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> Any:
        batch = collate(samples, self.function)
        return batch if isinstance(batch, DataError) else self.change(batch)


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
        """`batch` as graph `number` takes it, where it is shorter. Raises DataError where it is longer."""
        of_inputs = zip(*self.inputs, strict=True)
        lengths = {
            each[0].name: [spec.shape[0] for spec in each] for each in of_inputs if each[0].shape != each[-1].shape
        }

        def fitted(name: str, tensor: Tensor) -> Tensor:
            if name not in lengths or tensor.ndim < 2 or tensor.shape[1] == lengths[name][number]:
                return tensor
            if tensor.shape[1] > lengths[name][number]:
                raise _too_long(f"input {name} has samples", tensor.shape[1], lengths[name])
            return resized(tensor, lengths[name][number], self.padding.get(name, 0))

        return {name: fitted(name, tensor) for name, tensor in batch.items()}
