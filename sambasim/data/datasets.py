"""Datasets: the user's, with errors attributed to a sample; plain tensors, read in batches; and random samples."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from sambasim.data.user_code import summary, user_line
from sambasim.errors import DataError
from sambasim.options.grammar import FLOAT_DTYPES, InputSpec

DEFAULT_SAMPLES = 1024
_DEFAULT_BOUND = 2
"""Integers without a bound are 0 or 1: valid indices in every model."""
_MASK = 2**64 - 1
_AHEAD_BYTES = 256 * 1024
"""TensorBatches selects at least this much at a time: a selection of few rows is mostly overhead."""


@runtime_checkable
class MapStyle(Protocol):
    """A map-style dataset: a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """An error while a sample or a batch was read, as a value; `error` makes a DataError of it."""

    what: str
    where: str | None = None
    remedy: str | None = None

    def error(self) -> DataError:
        return DataError(self.what, where=self.where, remedy=self.remedy)


class Samples(list[object]):
    """The samples of one batch, with the `name` of the data source and their `indices` in its dataset."""

    def __init__(self, samples: Iterable[object], name: str, indices: Sequence[int]) -> None:
        super().__init__(samples)
        self.name = name
        self.indices = indices


class WatchedDataset(Dataset[object]):
    """The samples of `dataset`, or those that `chosen` lists; `name` is the data source's, for messages. `__getitem__`
    raises a failure as DataError; `__getitems__` returns it as a Failure among the samples."""

    def __init__(self, dataset: MapStyle, name: str, chosen: Sequence[int] | None = None) -> None:
        self.dataset = dataset
        self.name = name
        self.chosen: Sequence[int] = range(len(dataset)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> object:
        sample = self._read(self.chosen[index])
        if isinstance(sample, Failure):
            raise sample.error()
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        chosen = [self.chosen[index] for index in indices]
        many = getattr(self.dataset, "__getitems__", None)
        if not callable(many):
            return Samples(map(self._read, chosen), self.name, chosen)
        try:
            return Samples(many(chosen), self.name, chosen)
        except (Exception, SystemExit) as raised:
            failure = Failure(f"__getitems__ of {self.name} raised {summary(raised)}", where=user_line(raised))
            alone = map(self._read, chosen)  # finds the sample that raises
            found = next((one for one in alone if isinstance(one, Failure)), failure)
            return Samples([found], self.name, chosen)

    def _read(self, index: int) -> object:
        try:
            return self.dataset[index]
        except (Exception, SystemExit) as raised:  # SystemExit would end the run with exit code 0
            what = f"sample {index} of {self.name} raised {summary(raised)}"
            return Failure(what, where=user_line(raised), remedy=f"read it alone in Python: dataset[{index}]")


class TensorBatches:
    """Batches of a TensorDataset, by one selection of rows from each tensor: the same bits in a tenth of the time."""

    def __init__(self, tensors: Sequence[Tensor], chosen: Sequence[int]) -> None:
        self._tensors = tuple(tensors)
        self._chosen = torch.as_tensor(chosen, dtype=torch.int64)

    def batches(self, order: Sequence[int], batch_size: int) -> Iterator[list[Tensor]]:
        """One tensor `[batch_size, …]` for each value of a sample, without a last partial batch. `order`: positions in
        `chosen`."""
        rows = self._chosen[torch.as_tensor(order, dtype=torch.int64)]
        row_bytes = sum(tensor[:1].nbytes for tensor in self._tensors)
        ahead = max(1, _AHEAD_BYTES // max(1, row_bytes * batch_size))
        for index in torch.split(rows[: len(rows) // batch_size * batch_size], ahead * batch_size):
            read = (torch.split(tensor.index_select(0, index), batch_size) for tensor in self._tensors)
            yield from map(list, zip(*read, strict=True))


def tensor_batches(dataset: object) -> TensorBatches | None:
    """`dataset` as TensorBatches, or None if it is not a plain TensorDataset: a subclass may run code of its own."""
    if not isinstance(dataset, WatchedDataset) or type(dataset.dataset) is not TensorDataset:
        return None
    tensors = dataset.dataset.tensors
    plain = all(type(t) is Tensor and t.layout is torch.strided and not t.requires_grad for t in tensors)
    return TensorBatches(tensors, dataset.chosen) if plain else None


class SyntheticDataset(Dataset[dict[str, Tensor]]):
    """Random samples, a function of (seed, i) only. Floats are standard normal; integers and booleans are uniform."""

    def __init__(self, inputs: Sequence[InputSpec], samples: int = DEFAULT_SAMPLES, seed: int = 0) -> None:
        self.inputs = tuple(inputs)
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        generator = torch.Generator().manual_seed(_mix(self.seed, index))
        return {spec.name: _random(spec, generator) for spec in self.inputs}


def _random(spec: InputSpec, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.dtype in FLOAT_DTYPES:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    bound = _DEFAULT_BOUND if spec.exclusive_bound is None else spec.exclusive_bound
    return torch.randint(bound, spec.shape, generator=generator).to(dtype)


def _mix(seed: int, index: int) -> int:
    """One 64-bit seed from two, independent for neighbouring indices (splitmix64; Steele et al., OOPSLA 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
