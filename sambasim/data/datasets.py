"""Datasets: the user's, with errors attributed to a sample; plain tensors, read in batches; `.npz`
and `.safetensors` files; and random samples."""

import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from sambasim.data.user_code import summary, user_line
from sambasim.errors import DataError
from sambasim.options.grammar import FLOAT_DTYPES, InputSpec
from sambasim.units import format_bytes

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


_REMEDY = "write it with one array for each input, as many samples along the first axis of each"


class ArraysDataset(Dataset[dict[str, Tensor]]):
    """Sample i is `{name: array[i]}`. All arrays have the same first axis."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        self.arrays = dict(arrays)
        self.length = min(len(array) for array in self.arrays.values())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: array[index] for name, array in self.arrays.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        # one indexing operation for each array, whatever the batch size
        chosen = torch.tensor(indices)
        columns = [array[chosen].unbind(0) for array in self.arrays.values()]
        return [dict(zip(self.arrays, row, strict=True)) for row in zip(*columns, strict=True)]


def open_file(path: Path, inputs: Sequence[InputSpec] | None, optional: Collection[str] = frozenset()) -> ArraysDataset:
    """The samples of a file: the arrays named by `inputs`, of which it may lack the `optional` ones, or all in its
    order. Raises DataError."""
    if not path.is_file():
        raise DataError(f"there is no data file {path}", remedy="check the path, or name another: --set data.source=…")
    wanted = None if inputs is None else [spec.name for spec in inputs]
    read = _open_npz if path.suffix == ".npz" else _open_safetensors
    arrays = read(path, wanted, optional)
    if not arrays:
        raise DataError("the data file holds no arrays", where=str(path), remedy=_REMEDY)
    for name, array in arrays.items():
        if array.dim() == 0:
            what = f"array {name} is a single number; its first axis must be the samples"
            raise DataError(what, where=str(path), remedy=_REMEDY)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise DataError(f"the arrays differ in their number of samples: {found}", where=str(path), remedy=_REMEDY)
    return ArraysDataset(arrays)


def _choose(held: Sequence[str], wanted: Sequence[str] | None, optional: Collection[str], path: Path) -> Sequence[str]:
    if wanted is None:
        return held
    wanted = [name for name in wanted if name in held or name not in optional]
    missing = [name for name in wanted if name not in held]
    if missing:
        raise DataError(
            f"the data file lacks {', '.join(missing)}: it holds {', '.join(held) or 'nothing'}, "
            f"and the inputs are {', '.join(wanted)}",
            where=str(path),
            remedy="name the arrays as the inputs",
        )
    return wanted


def _open_npz(path: Path, wanted: Sequence[str] | None, optional: Collection[str]) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        sizes = {member.filename.removesuffix(".npy"): member.file_size for member in members}
        if len(sizes) < len(members):
            raise ValueError("it holds two arrays of one name")
        if sum(member.compress_size for member in members) > path.stat().st_size:
            raise ValueError("its members overlap")
        names = _choose(list(sizes), wanted, optional, path)
        needed = sum(sizes[name] for name in names)
        if needed > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise ValueError(f"its arrays take {format_bytes(needed)}, and the machine has {format_bytes(memory)}")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in names}
    except DataError:
        raise
    except Exception as raised:
        remedy = "write it with numpy.savez, arrays of numbers only"
        raise DataError(f"the data file cannot be read: {summary(raised)}", where=str(path), remedy=remedy) from raised


def _open_safetensors(path: Path, wanted: Sequence[str] | None, optional: Collection[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as held:
            names = _choose(list(held.keys()), wanted, optional, path)
            return {name: held.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as raised:
        remedy = "write it with safetensors.torch.save_file"
        raise DataError(f"the data file cannot be read: {summary(raised)}", where=str(path), remedy=remedy) from raised
