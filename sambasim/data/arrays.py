"""Data sets of arrays: files of numpy and of safetensors, and what is given as tensors by name."""

import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from sambasim.data.user_code import summary
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec
from sambasim.units import format_bytes


@dataclass(frozen=True, eq=False)
class ArraysDataset(Dataset[dict[str, Tensor]]):
    """Sample i is `{name: array[i]}`. All arrays have the same first axis."""

    arrays: Mapping[str, Tensor]

    def __len__(self) -> int:
        return min(map(len, self.arrays.values()))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: array[index] for name, array in self.arrays.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        chosen = torch.tensor(indices)  # one indexing operation for each array, whatever the batch size
        columns = [array[chosen].unbind(0) for array in self.arrays.values()]
        return [dict(zip(self.arrays, row, strict=True)) for row in zip(*columns, strict=True)]


def open_file(path: Path, inputs: Sequence[InputSpec] | None, optional: Collection[str] = frozenset()) -> ArraysDataset:
    """The arrays that `inputs` name, but for absent `optional` ones; without inputs, all. Raises DataError."""
    if not path.is_file():
        raise DataError(f"there is no data file {path}", remedy="check the path, or name another: --set data.source=…")
    wanted = None if inputs is None else [spec.name for spec in inputs]
    try:
        arrays = (_read_npz if path.suffix == ".npz" else _read_safetensors)(path, wanted, optional)
    except DataError:
        raise
    except Exception as raised:
        writer = "numpy.savez, arrays of numbers only" if path.suffix == ".npz" else "safetensors.torch.save_file"
        what = f"the data file cannot be read: {summary(raised)}"
        raise DataError(what, where=str(path), remedy=f"write it with {writer}") from raised
    numbers = [name for name, array in arrays.items() if array.dim() == 0]
    if not arrays:
        what = "the data file holds no arrays"
    elif numbers:
        what = f"array {numbers[0]} is a single number; its first axis must be the samples"
    elif len(set(map(len, arrays.values()))) > 1:
        counts = ", ".join(f"{name} has {len(array):,}" for name, array in arrays.items())
        what = f"the arrays differ in their number of samples: {counts}"
    else:
        return ArraysDataset(arrays)
    remedy = "write it with one array for each input, as many samples along the first axis of each"
    raise DataError(what, where=str(path), remedy=remedy)


def _choose(held: Sequence[str], wanted: Sequence[str] | None, optional: Collection[str], path: Path) -> Sequence[str]:
    if wanted is None:
        return held
    wanted = [name for name in wanted if name in held or name not in optional]
    if missing := [name for name in wanted if name not in held]:
        holds = f"it holds {', '.join(held) or 'nothing'}, and the inputs are {', '.join(wanted)}"
        what = f"the data file lacks {', '.join(missing)}: {holds}"
        raise DataError(what, where=str(path), remedy="name the arrays as the inputs")
    return wanted


def _read_npz(path: Path, wanted: Sequence[str] | None, optional: Collection[str]) -> dict[str, Tensor]:
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


def _read_safetensors(path: Path, wanted: Sequence[str] | None, optional: Collection[str]) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as held:
        return {name: held.get_tensor(name) for name in _choose(list(held.keys()), wanted, optional, path)}
