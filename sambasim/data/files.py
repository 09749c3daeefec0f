"""Samples from `.npz` and `.safetensors` files, which may come from anyone: numpy unpickles no objects, and the sizes
that an `.npz` file claims must fit into memory."""

import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from sambasim.data.user_code import summary
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec
from sambasim.units import format_bytes

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
