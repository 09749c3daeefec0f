"""From samples to a batch whose tensors carry the names of the inputs, and are what the PEF takes."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from sambasim.data.blame import summary
from sambasim.data.disagreement import disagreement
from sambasim.data.samples import Failure
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec

Batch: TypeAlias = "Tensor | Sequence[object] | Mapping[str, object] | Failure"

_NARROWED: Mapping[str, tuple[torch.dtype, ...]] = {
    "float32": (torch.float64,),
    "bfloat16": (torch.float64, torch.float32),
}
"""What is converted where a PEF takes something narrower, by the dtype that it takes."""


def collate(samples: Sequence[object]) -> Batch:
    """One batch of samples, by torch's default_collate: each tensor gets a first axis, the samples.

    Python's own floats have no width; they become float32, where default_collate would make float64 of them. Tensors
    and arrays keep theirs. What cannot be put together, or only by widening a dtype, is a Failure, which `bind` raises
    (see `samples`).
    """
    for sample in samples:
        if isinstance(sample, Failure):
            return sample
    try:
        batch = _narrowed(default_collate(list(samples)), samples[0])
    except Exception as raised:
        return disagreement(samples) or Failure(
            f"the samples of a batch cannot be put together: {summary(raised)}",
            remedy="give tensors and numbers, of one shape for each input: pad or crop them in the dataset",
        )
    return (disagreement(samples) or batch) if _widened(batch, samples[0]) else batch


def _widened(batch: Batch, sample: object) -> bool:
    """Whether a value of the batch is floating-point, and that of its first sample is a whole number."""
    if isinstance(batch, Mapping) and isinstance(sample, Mapping):
        pairs = [(value, sample[name]) for name, value in batch.items()]
    elif isinstance(sample, tuple | list) and isinstance(batch, list):
        pairs = list(zip(batch, sample, strict=True))
    else:
        pairs = [(batch, sample)]
    return any(isinstance(value, Tensor) and value.is_floating_point() and _is_whole(of) for value, of in pairs)


def _is_whole(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point()
    return isinstance(value, int | np.integer)


def _narrowed(batch: object, sample: object) -> Batch:
    def narrow(value: object, of: object) -> object:
        return value.to(torch.float32) if type(of) is float and isinstance(value, Tensor) else value

    if isinstance(sample, Mapping) and isinstance(batch, Mapping):
        return {name: narrow(value, sample[name]) for name, value in batch.items()}
    if isinstance(sample, tuple | list) and isinstance(batch, tuple | list):
        return [narrow(value, of) for value, of in zip(batch, sample, strict=True)]
    narrowed = narrow(batch, sample)
    return narrowed if isinstance(narrowed, Tensor) else [narrowed]


def bind(batch: Batch, names: Sequence[str], *, ignore_rest: bool = False) -> dict[str, Tensor]:
    """The tensors of a batch by input name, in the order of `names`: a sequence by position, a mapping by name.

    With `ignore_rest`, a sample may hold more, behind the inputs or under other names: labels, for an inference PEF.
    Raises DataError, naming both sides, if they do not match; if something is no tensor; and if reading had failed.
    """
    if isinstance(batch, Failure):
        raise batch.error()
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        extra = [name for name in batch if name not in names]
        if missing or (extra and not ignore_rest):
            raise DataError(
                f"a sample has {_list(batch)}, and the inputs are {_list(names)}",
                remedy="name the values of a sample as the inputs, and leave out the others",
            )
        values = [batch[name] for name in names]
    else:
        values = [batch] if isinstance(batch, Tensor) else list(batch)
        values = values[: len(names)] if ignore_rest else values
        if len(values) != len(names):
            count = f"{len(values)} value{'' if len(values) == 1 else 's'}"
            raise DataError(
                f"a sample has {count}, and the inputs are {_list(names)}",
                remedy="give one value for each input, in this order",
            )
    bound: dict[str, Tensor] = {}
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            raise DataError(
                f"what a sample gives for {name} is no tensor or number, but {_kind(value)}",
                remedy="give tensors and numbers, side by side in one tuple or dict",
            )
        bound[name] = value
    return bound


def _list(names: Sequence[str] | Mapping[str, object]) -> str:
    return f"({', '.join(names)})"


def _kind(value: object) -> str:
    """What default_collate has made of a value: a list of texts, or a structure inside a sample."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | bytes):
        return "text"
    return f"a {type(value).__name__}"


def check(batch: Mapping[str, Tensor], inputs: Sequence[InputSpec], batch_size: int) -> dict[str, Tensor]:
    """The batch, once it is what the PEF takes: `batch_size` samples of each input's dtype and shape.

    float64 is narrowed to float32 where the PEF takes float32, as NumPy makes float64 of everything, and both to
    bfloat16, which data sets do not have; nothing else is converted. Raises DataError with the input, what is given,
    and what the PEF takes.
    """
    checked: dict[str, Tensor] = {}
    for spec in inputs:
        given = batch[spec.name]
        if given.dtype in _NARROWED.get(spec.dtype, ()):
            given = given.to(getattr(torch, spec.dtype))
        dtype = str(given.dtype).removeprefix("torch.")
        if dtype != spec.dtype or tuple(given.shape) != (batch_size, *spec.shape):
            takes = InputSpec(spec.name, spec.dtype, (batch_size, *spec.shape))
            gives = InputSpec(spec.name, dtype, tuple(given.shape))
            raise DataError(
                f"input {spec.name} is {gives}, and the PEF takes {takes}",
                remedy="make the samples fit, or compile again with this data",
            )
        checked[spec.name] = given
    return checked
