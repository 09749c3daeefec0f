"""Samples from `.npz` and `.safetensors` files: named arrays whose first axis is the samples.

Files may come from anyone: before memory is allocated, the sizes that an `.npz` file claims are checked.
"""

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from sambasim.data.user_code import summary
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec
from sambasim.units import format_bytes

_REMEDY = "write it with one array for each input, as many samples along the first axis of each"
_SUFFIX = ".npy"
_PIECE_BYTES = 1 << 20
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy.savez and numpy.savez_compressed write


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


def open_file(path: Path, inputs: Sequence[InputSpec] | None) -> ArraysDataset:
    """The samples of a file: the arrays named by `inputs`, or all of them in the file's order.

    A `.safetensors` file is memory-mapped; an `.npz` file is read whole. Raises DataError if the file cannot be read,
    lacks an input, or if its arrays have different numbers of samples.
    """
    if not path.is_file():
        raise DataError(f"there is no data file {path}", remedy="check the path, or name another: --set data.source=…")
    wanted = None if inputs is None else [spec.name for spec in inputs]
    arrays = _open_npz(path, wanted) if path.suffix == ".npz" else _open_safetensors(path, wanted)
    if not arrays:
        raise DataError("the data file holds no arrays", where=str(path), remedy=_REMEDY)
    for name, array in arrays.items():
        if array.dim() == 0:
            what = f"array {name} is a single number; its first axis must be the samples"
            raise DataError(what, where=str(path), remedy=_REMEDY)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise DataError(f"the arrays differ in their number of samples: {told}", where=str(path), remedy=_REMEDY)
    return ArraysDataset(arrays)


def _choose(held: Sequence[str], wanted: Sequence[str] | None, path: Path) -> Sequence[str]:
    if wanted is None:
        return held
    missing = [name for name in wanted if name not in held]
    if missing:
        raise DataError(
            f"the data file lacks {', '.join(missing)}: it holds {', '.join(held) or 'nothing'}, "
            f"and the inputs are {', '.join(wanted)}",
            where=str(path),
            remedy="name the arrays as the inputs",
        )
    return wanted


def _open_npz(path: Path, wanted: Sequence[str] | None) -> dict[str, Tensor]:
    arrays: dict[str, Tensor] = {}
    try:
        arrays.update(_read_npz(path, wanted))
    except DataError:
        raise
    except Exception as raised:
        remedy = "write it with numpy.savez, arrays of numbers only"
        raise DataError(f"the data file cannot be read: {summary(raised)}", where=str(path), remedy=remedy) from raised
    return arrays


def _open_safetensors(path: Path, wanted: Sequence[str] | None) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as held:
            return {name: held.get_tensor(name) for name in _choose(list(held.keys()), wanted, path)}
    except (SafetensorError, OSError) as raised:
        remedy = "write it with safetensors.torch.save_file"
        raise DataError(f"the data file cannot be read: {summary(raised)}", where=str(path), remedy=remedy) from raised


def _read_npz(path: Path, wanted: Sequence[str] | None) -> Iterator[tuple[str, Tensor]]:
    """The wanted arrays, one after another. Raises ValueError for one that differs from its header, or is too large."""
    with zipfile.ZipFile(path) as archive:
        members = _members(archive, path)
        names = _choose(tuple(members), wanted, path)
        needed = sum(members[name].file_size for name in names)
        if needed > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise ValueError(f"its arrays take {format_bytes(needed)}, and the machine has {format_bytes(memory)}")
        for name in names:
            with archive.open(members[name]) as file:
                yield name, torch.from_numpy(_read(file, name, members[name].file_size))


def _members(archive: zipfile.ZipFile, path: Path) -> Mapping[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(_SUFFIX)
        if name in found:
            raise ValueError(f"the array {name[:80]!r} appears twice")
        if member.compress_type not in _PLAIN or member.flag_bits & 0x1:
            raise ValueError(f"the array {name[:80]!r} is encrypted, or compressed in a way that numpy does not write")
        found[name] = member
    stored = sum(member.compress_size for member in found.values())
    if stored > path.stat().st_size:
        raise ValueError("its members overlap")
    return found


def _read(file: IO[bytes], name: str, member_bytes: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"the array {name[:80]!r} has a header of version {version[0]}.{version[1]}")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError(f"Object arrays cannot be loaded: {name[:80]!r} holds Python objects, which may run code")
    claimed, held = prod(shape) * dtype.itemsize, member_bytes - file.tell()
    if claimed != held or min(shape, default=0) < 0:
        raise ValueError(f"the array {name[:80]!r} claims {claimed} bytes, and has {held}")
    data = bytearray(claimed)
    view, filled = memoryview(data), 0
    while filled < claimed:
        piece = file.read(min(claimed - filled, _PIECE_BYTES))
        count = len(piece)
        view[filled : filled + count] = piece
        if not count:
            raise ValueError(f"the array {name[:80]!r} ends after {filled} of {claimed} bytes")
        filled += count
    file.read(1)  # at the end, zipfile compares the checksum
    return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if by_columns else "C")
