"""From data options to datasets: files, functions, synthetic data, held-out samples."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.utils.data import Dataset, TensorDataset

from sambasim.data.datasets import Source, open_source, split_indices
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec, parse_input
from sambasim.options.training import DataOptions

INPUTS = (InputSpec("x", "float32", (3,)), InputSpec("target", "int64", (), 5))


class Broken(Dataset[int]):
    def __len__(self) -> int:
        raise RuntimeError("the index file is gone")

    def __getitem__(self, index: int) -> int:
        return index


def ten() -> TensorDataset:
    return TensorDataset(torch.arange(10))


def given_by(result: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """The target of a data function that returns `result`."""
    monkeypatch.setattr(sys.modules[__name__], "_result", lambda: result, raising=False)
    monkeypatch.setitem(sys.modules, "given_data", sys.modules[__name__])
    return "given_data:_result"


def values(source: Source) -> tuple[list[int], list[int]]:
    def of(dataset: Any) -> list[int]:
        return [int(dataset[index][0]) for index in range(len(dataset))]

    return of(source.train), of(source.evaluation) if source.evaluation is not None else []


@given(count=st.integers(0, 400), fraction=st.floats(0, 1, exclude_max=True))
def test_a_split_is_disjoint_covering_and_always_the_same(count: int, fraction: float) -> None:
    kept, held = split_indices(count, fraction)
    assert sorted(kept + held) == list(range(count))
    assert len(held) == round(count * fraction)
    assert (kept, held) == split_indices(count, fraction)
    assert kept == sorted(kept)


def test_the_split_is_frozen_because_another_would_make_old_results_incomparable() -> None:
    assert split_indices(1000, 0.1)[1][:5] == [7, 13, 14, 26, 31]


def test_a_function_gives_one_set_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    one = open_source(DataOptions(source=given_by(ten(), monkeypatch)), None)
    assert values(one) == (list(range(10)), [])
    two = open_source(DataOptions(source=given_by((ten(), [torch.tensor([7])]), monkeypatch)), None)
    assert values(two) == (list(range(10)), [7])
    assert two.description == "given_data:_result: 10 samples to train, 1 held out"
    none = open_source(DataOptions(source=given_by((ten(), None), monkeypatch)), None)
    assert none.evaluation is None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: {"x": 1}, "gave dict, which is no data set"),
        (lambda: (torch.zeros(3), torch.zeros(3)), "or torch.utils.data.TensorDataset(*tensors)"),
        (lambda: (ten(), ten(), ten()), "gave a tuple of 3; it must give a dataset, or (train, evaluation)"),
        (lambda: iter([1]), "return a map-style Dataset, one with __len__ and __getitem__"),
        (lambda: [], "the training set of given_data:_result is empty"),
        (lambda: Broken(), "the length of the training set of given_data:_result raised RuntimeError: the index file"),
    ],
)
def test_what_is_no_data_set_is_refused(make: Callable[[], object], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as caught:
        open_source(DataOptions(source=given_by(make(), monkeypatch)), None)
    assert text in str(caught.value)


def test_fractions_that_cannot_be_held_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = DataOptions(source=given_by((ten(), ten()), monkeypatch), evaluation_fraction=0.5)
    with pytest.raises(DataError, match=r"gives an evaluation set, and data.evaluation_fraction = 0.5 asks for"):
        open_source(pair, None)
    single = DataOptions(source=given_by([torch.zeros(1)], monkeypatch), evaluation_fraction=0.4)
    with pytest.raises(DataError, match=r"has 1 samples: data.evaluation_fraction = 0.4 leaves 1 to train and 0 to"):
        open_source(single, None)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_give_their_arrays_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    arrays: dict[str, NDArray[Any]] = {"x": x, "target": np.arange(4), "extra": np.zeros(4)}
    if suffix == ".npz":
        write(path, **arrays)
    else:
        save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    source = open_source(DataOptions(source=str(path)), INPUTS)
    sample = _named(source.train[2])
    assert list(sample) == ["x", "target"], "with inputs, what no input takes is left out"
    assert sample["x"].tolist() == [6.0, 7.0, 8.0]
    assert sample["target"] == 2
    everything = open_source(DataOptions(source=str(path)), None).train
    assert set(_named(everything[0])) == {"x", "target", "extra"}
    many = everything.__getitems__([3, 1])
    for index, sample in zip((3, 1), map(_named, many), strict=True):
        alone = _named(everything[index])
        assert all(torch.equal(sample[name], alone[name]) for name in alone)


def _named(sample: object) -> dict[str, torch.Tensor]:
    """A sample that must be tensors by name."""
    assert isinstance(sample, dict)
    return sample


def write(path: Path, **arrays: NDArray[Any]) -> str:
    np.savez(path, allow_pickle=True, **arrays)
    return str(path)


OBJECTS, TEXT = np.array([{}, {}], dtype=object), np.array(["a", "b"])


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (None, "there is no data file {path}"),
        ({"x": np.zeros((2, 3)), "label": np.zeros(2)}, "lacks target: it holds x, label, and the inputs are x,"),
        ({"x": np.zeros((2, 3)), "target": np.zeros(3)}, "differ in their number of samples: x has 2, target has 3"),
        ({"x": np.zeros((2, 3)), "target": np.array(3)}, "target is a single number; its first axis must be"),
        ({"x": OBJECTS, "target": np.zeros(2)}, "the data file cannot be read: ValueError: Object arrays cannot be"),
        ({"x": TEXT, "target": np.zeros(2)}, "write it with numpy.savez, arrays of numbers only"),
        ({"x": np.zeros((0, 3)), "target": np.zeros(0)}, "is empty"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, NDArray[Any]] | None, text: str) -> None:
    path = tmp_path / "data.npz"
    if arrays is not None:
        write(path, **arrays)
    with pytest.raises(DataError) as caught:
        open_source(DataOptions(source=str(path)), INPUTS)
    assert text.format(path=path) in str(caught.value)


@pytest.mark.parametrize("name", ["damaged.npz", "damaged.safetensors"])
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(DataError, match="the data file cannot be read"):
        open_source(DataOptions(source=str(tmp_path / name)), INPUTS)


def test_synthetic_samples_are_a_function_of_seed_and_index() -> None:
    others = {"mask": "bool[64]", "half": "bfloat16[4]", "n": "uint8[100]"}
    inputs = (*INPUTS, *(parse_input(name, text) for name, text in others.items()))

    def samples(seed: int) -> Source:
        return open_source(DataOptions(source="synthetic", samples=50, args={"seed": seed}), inputs)

    first, again, other = (samples(seed).train for seed in (3, 3, 4))
    assert len(first) == 50
    rest, alone = [_named(first[index]) for index in range(50)], _named(again[49])
    for spec in inputs:
        assert torch.equal(rest[49][spec.name], alone[spec.name]), "whatever was drawn before"
        assert alone[spec.name].dtype is getattr(torch, spec.dtype)
        assert alone[spec.name].shape == spec.shape
    assert not torch.equal(rest[49]["x"], _named(other[49])["x"])
    assert not torch.equal(rest[49]["x"], _named(other[48])["x"]), "the next seed is no shift"
    assert len({tuple(sample["x"].tolist()) for sample in rest}) == 50
    assert {int(sample["target"]) for sample in rest} == set(range(5))
    assert set(rest[0]["mask"].tolist()) == {False, True}
    assert set(rest[0]["n"].tolist()) == {0, 1}, "whole numbers without a bound"


def test_synthetic_data_needs_inputs_and_takes_the_pefs_first() -> None:
    with pytest.raises(DataError, match=r"synthetic data needs the inputs of one sample"):
        open_source(DataOptions(source="synthetic"), None)
    options = DataOptions(source="synthetic", inputs={"y": "int8[2] < 3"})
    assert set(_named(open_source(options, None).train[0])) == {"y"}
    assert set(_named(open_source(options, INPUTS).train[0])) == {"x", "target"}
    assert len(open_source(options, INPUTS).train) == 1024
