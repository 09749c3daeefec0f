"""The identity of data: equal for equal content, and other for another value, whatever holds it."""

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from sambasim.data import identity
from sambasim.data.arrays import ArraysDataset
from sambasim.data.identity import identity_of, identity_of_file
from sambasim.errors import MachineError


class Own(Dataset[object]):
    """A data set of the user's, whose code must not run."""

    def __init__(self, rows: Tensor, **more: object) -> None:
        self.rows, self.rank, self.folder = rows, id(self), f"/scratch/{id(self)}"
        vars(self).update(more)

    def __len__(self) -> int:
        raise AssertionError

    def __getitem__(self, index: int) -> object:
        raise AssertionError


class OwnList(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError

    __len__ = __iter__ = __str__ = __getitem__  # type: ignore[assignment]  # none is to be called


class OwnDict(dict[Any, Any]):
    __getitem__ = __len__ = __iter__ = keys = items = values = __str__ = OwnList.__getitem__  # type: ignore[assignment]  # nor these


class Key:
    def __str__(self) -> str:
        raise AssertionError


@dataclass(slots=True)
class Slots:
    x: Tensor


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "tensors": lambda rows: TensorDataset(torch.arange(6), rows),
    "arrays": lambda rows: ArraysDataset({"x": rows}),
    "attribute": Own,
    "numpy": lambda rows: Own(torch.zeros(1), data=rows.numpy()),
    "subset": lambda rows: Subset(TensorDataset(rows), [0, 1]),
    "concatenation": lambda rows: ConcatDataset([TensorDataset(torch.zeros(2)), TensorDataset(rows)]),
    "stack": lambda rows: StackDataset(x=TensorDataset(rows), y=TensorDataset(torch.zeros(6))),
    "list of samples": lambda rows: [(row, 1) for row in rows],
    "numbers": lambda rows: Own(torch.zeros(1), tokens=rows.flatten().tolist()),
    "bytes": lambda rows: Own(torch.zeros(1), images=[rows.numpy().tobytes()]),
    "plain object": lambda rows: Own(torch.zeros(1), store=SimpleNamespace(x=rows)),
    "slots": lambda rows: Own(torch.zeros(1), store=[Slots(rows)]),
    "deque": lambda rows: deque([rows]),
    "own list": lambda rows: OwnList([rows]),
    "own mapping": lambda rows: OwnDict({Key(): rows}),
    "numbers of samples": lambda rows: [{"x": value} for value in rows.flatten().tolist()],
    "numbers of NumPy": lambda rows: list(rows.flatten().numpy()),
    "conjugate": lambda rows: TensorDataset(torch.complex(rows, rows).conj()),
    "transposed": lambda rows: TensorDataset(rows.T),
    "bfloat16": lambda rows: TensorDataset(rows.bfloat16()),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("whole", [True, False])
def test_one_other_value_changes_it(
    holder: Callable[[Tensor], object], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(identity, "READ_WHOLE_BYTES", 16)
        monkeypatch.setattr(identity, "_MOST_ITEMS", 5)
    rows = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    other = rows.clone()
    other[0, 0] = -1  # which is always in a sample
    own = identity_of(holder(rows))
    assert own == identity_of(holder(rows.clone()))
    assert own != identity_of(holder(other))
    assert own.split()[0] == ("content" if whole else "sample")


def test_data_that_hold_no_arrays_are_known_by_nothing() -> None:
    one, other = (identity_of(Own(name, generator=np.random.default_rng(0))) for name in ("a", "b"))  # type: ignore[arg-type]  # any attribute
    assert one == other
    assert one.startswith("length ")


@pytest.mark.parametrize(
    "held",
    [{1}, np.random.default_rng(0), np.array([{}]), torch.zeros(2).to_sparse(), np.ma.zeros(2), iter([1])],
    ids=type,
)
def test_content_is_of_everything(held: object) -> None:
    assert identity_of(torch.zeros(1), [held]).startswith("sample ")


@pytest.mark.parametrize(
    "array",
    [torch.zeros(3_000_000), torch.zeros(1).expand(1 << 33), np.zeros((1, 3_000_000)), torch.zeros(1 << 12, 1 << 10)],
    ids=["flat", "endless", "one row", "rows"],
)
def test_of_large_arrays_a_bounded_sample_is_read(array: identity.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "READ_WHOLE_BYTES", 1 << 16)
    read: list[int] = []
    whole = identity._bytes

    def bytes_of(part: identity.Array) -> bytes:
        read.append(part.nbytes)
        return whole(part)

    monkeypatch.setattr(identity, "_bytes", bytes_of)
    assert identity_of(array).startswith("sample ")
    assert 1 << 14 <= sum(read) <= 1 << 16


def test_lists_are_sampled_too() -> None:
    assert identity_of([torch.tensor(at) for at in range(20_000)]).startswith("sample ")
    assert identity_of([0] * 19_999 + [1]) != identity_of([0] * 20_000)


def test_all_lists_together_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_MOST_ITEMS", 64)
    seen = 0
    whole = identity._walk

    def walk(*args: Any, **listed: bool) -> Any:
        nonlocal seen
        seen += 1
        return whole(*args, **listed)

    monkeypatch.setattr(identity, "_walk", walk)
    lists = {str(name): [0] * 50 for name in range(2_000)}
    assert identity_of(Own(torch.zeros(1), **lists)).startswith("sample ")
    assert identity_of(Own(torch.zeros(1), lists=lists)).startswith("sample ")
    assert seen < 5_000


def test_holders_of_themselves_have_an_end() -> None:
    held: list[object] = [1]
    held.append(held)
    assert identity_of(held).startswith("sample ")


def test_a_file_has_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert identity_of_file(file).startswith("length ")
    file.write_bytes(b"a")
    assert identity_of_file(file).startswith("content ")


@pytest.mark.parametrize("listed", [["0.png", "1.png"], [("0.png", 1), ("1.png", 0)], {0: [Path("0.png")]}])
def test_samples_that_texts_stand_for_are_not_its_content(listed: object) -> None:
    assert identity_of(SimpleNamespace(files=listed, shape=(3, 32, 32))).startswith("sample ")


def test_a_file_that_memory_cannot_map_is_told_with_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(bytes(8))
    monkeypatch.setattr(np, "memmap", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
    with pytest.raises(MachineError, match=r"not enough memory for .*w.safetensors \(8 B\)"):
        identity_of_file(path)
