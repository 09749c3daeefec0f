"""From samples to a batch: collate them, name the tensors as the inputs, and check dtypes and shapes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from sambasim.data.datasets import Collate, Padding, Samples, WatchedDataset
from sambasim.data.user_code import summary, user_line
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec
from sambasim.units import counted

Batch: TypeAlias = "Tensor | Sequence[object] | Mapping[str, object] | DataError"

_WIDER = (torch.float64, torch.float32)
_NARROWED: Mapping[str, tuple[torch.dtype, ...]] = {"float32": _WIDER[:1], "bfloat16": _WIDER, "float16": _WIDER}

_TENSORS = "give tensors and numbers, side by side in one tuple or dict"
ONE_TENSOR = 'make a list of numbers one tensor; of a Hugging Face data set: dataset.with_format("torch")'


def batch_of(dataset: WatchedDataset, indices: Sequence[int]) -> Batch:
    """Of a stream, `indices` is a range."""
    of_stream = islice(dataset.stream(), indices[0], indices[-1] + 1) if dataset.is_stream else None
    return collate(dataset.__getitems__(indices) if of_stream is None else list(of_stream), dataset.collate)


def collate(samples: Sequence[object], function: Collate | Padding | None = None) -> Batch:
    """One batch of samples, by `function` or torch's default_collate, with float32 for Python floats. Returns a
    DataError, which `bind` raises, if samples do not fit together without widening a dtype; of samples that are dicts
    it has one in place of each column that does not."""
    if samples and isinstance(samples[0], DataError):
        return samples[0]
    if isinstance(function, Padding):
        samples = _evened(samples, function)
    elif function is not None:
        try:
            made = function(list(samples))
        except (Exception, SystemExit) as raised:  # SystemExit would end the run with exit code 0
            what = f"the collate function {getattr(function, '__name__', function)} raised {summary(raised)}"
            remedy = "correct that line; --set data.collate= removes the one that a PEF names"
            return DataError(what, where=user_line(raised), remedy=remedy)
        return made if isinstance(made, Tensor | Mapping | tuple | list | DataError) else [made]
    try:
        batch = _joined(list(samples))
    except Exception as raised:
        if isinstance(samples[0], Mapping) and len(samples[0]) > 1:
            return {str(name): _column(samples, name) for name in samples[0]}
        what = f"the samples of a batch cannot be put together: {summary(raised)}"
        remedy = "give tensors and numbers, of one shape for each input: pad or crop them in the dataset"
        return _disagreement(samples) or DataError(what, remedy=remedy)
    return batch if isinstance(batch, Tensor | Mapping | list) else [batch]


def _evened(samples: Sequence[Any], padding: Padding) -> Sequence[object]:
    columns = [dict(values_of(sample)) for sample in samples]
    if any(column.keys() != columns[0].keys() for column in columns):
        return samples  # torch's function says what differs
    for at, name in enumerate(columns[0]):
        values = [torch.as_tensor(v) if _is_of_numbers(v := column[name]) else v for column in columns]
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
        if len(tensors) == len(values) and len({len(tensor) for tensor in tensors}) > 1:
            given = name if isinstance(samples[0], Mapping) or at >= len(padding.names) else padding.names[at]
            padded = pad_sequence(tensors, batch_first=True, padding_value=padding.values.get(given, 0))
            for column, tensor in zip(columns, padded, strict=True):
                column[name] = tensor
    return columns if isinstance(samples[0], Mapping) else [tuple(column.values()) for column in columns]


def _is_of_numbers(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _column(samples: Sequence[object], name: object) -> object:
    column: list[object] = [{name: of[name]} if isinstance(of, Mapping) and name in of else {} for of in samples]
    if isinstance(samples, Samples):
        column = Samples(column, samples.name, samples.indices)
    batch = collate(column)
    return batch[cast(str, name)] if isinstance(batch, Mapping) else batch


def _joined(values: list[Any]) -> Any:
    """As default_collate, with float32 for Python floats. Raises TypeError where integers would become floats."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _joined([value[name] for value in values]) for name in first}
    if isinstance(first, tuple | list):
        return [_joined([*column]) for column in zip(*values, strict=True)]
    joined = default_collate(values)
    if type(first) is float:
        return joined.to(torch.float32)
    is_integer = not first.is_floating_point() if isinstance(first, Tensor) else isinstance(first, int | np.integer)
    if is_integer and joined.is_floating_point():
        raise TypeError("integers and floats")
    return joined


def flat(value: object, name: str, whole: Collection[str] = ()) -> Iterator[tuple[str, object]]:
    """The values inside of dicts, tuples and lists, each with its dotted name; those of a dict in order of their keys,
    whatever order the dict has. A batch of texts is one value, and so is what has a name of `whole`."""
    if name in whole:
        yield name, value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flat(value[key], f"{name}.{key}", whole)
    elif isinstance(value, tuple | list) and not is_text(value):
        for index, item in enumerate(value):
            yield from flat(item, f"{name}.{index}", whole)
    else:
        yield name, value


def each_value(value: Any, change: Callable[[Any, str], object], name: str = "") -> Any:
    """`value` with `change` of each value, and of its name by `flat`, in the same dicts, tuples and lists."""
    if isinstance(value, Mapping):
        return {key: each_value(item, change, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list) and not is_text(value):
        changed = [each_value(item, change, f"{name}.{index}") for index, item in enumerate(value)]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value, name)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal: tensors and arrays by dtype and content, and dicts, tuples and lists by what is
    inside; nan is equal to nan."""
    if one is other:
        return True
    for kind in (Tensor, np.ndarray, tuple, list):
        if isinstance(one, kind) is not isinstance(other, kind):
            return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other or (one != one and other != other))


def is_list_of_numbers(value: object) -> bool:
    return type(value) is list and len(value) > 1 and all(type(one) in (int, float) for one in value)


def is_text(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, str | bytes) for item in value)


def bind(batch: Batch, names: Sequence[str], *, ignore_rest: bool = False) -> dict[str, Tensor]:
    """The tensors of a batch by input name, in the order of `names`: a sequence by position, a mapping by name, what is
    inside as `flat` has it; a mapping may have more. Raises DataError if they do not fit. `ignore_rest`: a sequence may
    have more too."""
    if isinstance(batch, DataError):
        raise batch
    if isinstance(batch, Mapping):
        batch = dict(values_of(batch))
        if missing := [name for name in names if name not in batch]:
            what = f"a sample has ({', '.join(batch)}), and the inputs are ({', '.join(names)})"
            is_list = f"{missing[0]}.0" in batch
            raise DataError(what, remedy=ONE_TENSOR if is_list else "name the values of a sample as the inputs")
        values = [batch[name] for name in names]
    else:
        values = [value for _, value in values_of(batch)]
        values = values[: len(names)] if ignore_rest else values
        if len(values) != len(names):
            what = f"a sample has {counted(len(values), 'value')}, and the inputs are ({', '.join(names)})"
            raise DataError(what, remedy="give one value for each input, in this order")
    bound: dict[str, Tensor] = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, DataError):
            raise value
        if not isinstance(value, Tensor):
            raise DataError(f"what a sample gives for {name} is no tensor or number", remedy=_TENSORS)
        bound[name] = value.detach() if value.requires_grad else value
    return bound


def check(batch: Mapping[str, Tensor], inputs: Sequence[InputSpec], batch_size: int) -> dict[str, Tensor]:
    """The batch, checked; only wider floats are converted. Raises DataError."""
    checked: dict[str, Tensor] = {}
    for spec in inputs:
        tensor = batch[spec.name]
        if tensor.dtype in _NARROWED.get(spec.dtype, ()):
            wide, tensor = tensor, tensor.to(getattr(torch, spec.dtype))
            if spec.dtype == "float16" and bool((tensor.isinf() & wide.isfinite()).any()):
                what = f"input {spec.name} holds {float(wide.abs().max()):g}, and float16 ends at 65504"
                raise DataError(what, remedy="scale the samples, or compile with --dtype bf16 or fp32")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != spec.dtype or tuple(tensor.shape) != (batch_size, *spec.shape):
            takes = InputSpec(spec.name, spec.dtype, (batch_size, *spec.shape))
            gives = InputSpec(spec.name, dtype, tuple(tensor.shape))
            what = f"input {spec.name} is {gives}, and the PEF takes {takes}"
            raise DataError(what, remedy="make the samples fit, or compile again with this data")
        checked[spec.name] = tensor
    return checked


def _disagreement(samples: Sequence[object]) -> DataError | None:
    """Which sample differs from the first one, and how; None if all agree."""
    for position, sample in enumerate(samples):
        values = sample.values() if isinstance(sample, Mapping) else sample
        if isinstance(values, Iterable) and any(map(is_list_of_numbers, values)):
            return DataError(f"{_called(samples, position)} gives a list of numbers", remedy=ONE_TENSOR)
    first = dict(values_of(samples[0]))
    for name, value in first.items():
        if not isinstance(value, Tensor | np.ndarray | np.generic | int | float | str | bytes):
            what = f"{_called(samples, 0)} gives {_kind(value)} for {name}, which is no tensor or number"
            return DataError(what, remedy=_TENSORS)
    for position, sample in enumerate(samples):
        values = dict(values_of(sample))
        for name in {**first, **values}:
            now, was = (_kind(of[name]) if name in of else "nothing" for of in (values, first))
            if now != was:
                what = f"{_called(samples, position)} gives {now} for {name}, and {_called(samples, 0)} gives {was}"
                remedy = "give all samples the same values, shapes and dtypes: pad, crop or convert them in the dataset"
                remedy += "; or compile for several lengths: --set 'data.buckets=[64, 128]'"
                return DataError(what, remedy=remedy)
    return None


def _called(samples: Sequence[object], position: int) -> str:
    if isinstance(samples, Samples):
        return f"sample {samples.indices[position]} of {samples.name}"
    return f"sample {position} of the batch"


def values_of(sample: object) -> Iterator[tuple[str, object]]:
    """The values of a sample or a batch, by the name that messages give them."""
    if isinstance(sample, Mapping):
        for name, value in sample.items():
            yield from flat(value, str(name))
    elif isinstance(sample, tuple | list):
        for position, value in enumerate(sample):
            yield from flat(value, f"value {position}")
    else:
        yield "its value", sample


def _kind(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return "None" if value is None else f"a {type(value).__name__}"
