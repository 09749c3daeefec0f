"""Samples of several lengths: how they are padded, which graph takes them, and in which order they are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sambasim.data.batches import ONE_TENSOR, collate
from sambasim.data.buckets import Shapes, check_padding, of_length, resized
from sambasim.data.datasets import Padding, WatchedDataset
from sambasim.errors import DataError, OptionError
from sambasim.options.grammar import parse_input
from sambasim.options.training import DataOptions
from sambasim.runtime.run.order import Order


def _of(*lengths: int) -> list[dict[str, Any]]:
    """Samples of such lengths, of ones, with a number each."""
    return [{"x": torch.ones(length), "y": torch.ones(length, dtype=torch.int64), "n": 3} for length in lengths]


def test_samples_are_padded_to_the_longest_of_their_batch() -> None:
    by_name = collate([{**one, "x": one["x"].numpy()} for one in _of(2, 4)], Padding({"y": -100}))
    assert isinstance(by_name, dict)
    assert by_name["x"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert by_name["y"].tolist() == [[1, 1, -100, -100], [1, 1, 1, 1]]
    assert by_name["n"].tolist() == [3, 3]
    by_place = collate(
        [(torch.ones(1), torch.zeros(1)), (torch.ones(2), torch.zeros(2))], Padding({"y": 7}, ("x", "y"))
    )
    assert isinstance(by_place, list)
    assert [column.tolist() for column in by_place] == [[[1, 0], [1, 1]], [[0, 7], [0, 0]]]


def test_arrays_of_text_are_left_as_they_are() -> None:
    samples = [{"x": torch.ones(n), "words": np.array(["a"] * n)} for n in (1, 2)]
    found = collate(samples, Padding())
    assert isinstance(found, dict)
    assert found["x"].tolist() == [[1, 0], [1, 1]]
    assert isinstance(found["words"], DataError)


def test_what_does_not_fit_together_is_told_as_without_buckets() -> None:
    found = collate([{"x": torch.ones(2)}, {"z": torch.ones(3)}], Padding())
    assert isinstance(found, DataError)
    assert "gives nothing for x" in found.what


@pytest.mark.parametrize(("length", "row"), [(1, [1]), (2, [1, 1]), (4, [1, 1, 9, 9])])
def test_a_batch_gets_another_length(length: int, row: Sequence[int]) -> None:
    assert resized(torch.ones(1, 2), length, 9).tolist() == [row]
    batch = {"x": torch.ones(3, 2, 5), "y": torch.ones(3, 2), "image": torch.ones(3, 7, 7), "n": torch.ones(3)}
    shapes = {name: list(value.shape) for name, value in of_length(batch, length, {}, (1, 2, 4)).items()}
    assert shapes == {"x": [3, length, 5], "y": [3, length], "image": [3, 7, 7], "n": [3]}


def test_single_numbers_have_no_length() -> None:
    with pytest.raises(DataError, match="lengths of samples"):
        of_length({"n": torch.ones(3)}, 2, {}, (2,))


def test_a_sample_longer_than_all_graphs_is_not_cut() -> None:
    with pytest.raises(DataError, match=r"samples are of length 9, and the longest of data\.buckets is 8") as caught:
        of_length({"x": torch.ones(3, 9)}, 4, {}, (8, 4))
    assert caught.value.remedy == "cut them, or compile with --set 'data.buckets=[4, 8, 9]'"
    with pytest.raises(DataError, match=r"input x has samples of length 9, and the longest of data\.buckets is 8"):
        SHAPES.padded({"x": torch.ones(2, 9), "z": torch.zeros(2, 3)}, 1)


def test_a_tensor_without_a_length_is_left_to_the_check_of_its_shape() -> None:
    batch = {"x": torch.ones(2), "z": torch.zeros(2, 3)}
    assert SHAPES.first_for(batch) == 0
    assert SHAPES.padded(batch, 0)["x"] is batch["x"]


@pytest.mark.parametrize(
    ("padding", "what", "remedy"),
    [
        ({"nn": -100.0}, "data.padding.nn is of no input: these are x, n",
         "--set data.padding.n=-100 --set data.padding.nn="),
        ({"n": 2.5}, "data.padding.n = 2.5, and the input is int64", "--set data.padding.n=2"),
    ],
)  # fmt: skip
def test_padding_that_does_not_fit_the_inputs(padding: dict[str, float], what: str, remedy: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_padding(padding, [parse_input("x", "float32[4]"), parse_input("n", "int64[4]")])
    assert (caught.value.what, caught.value.remedy) == (what, remedy)


def test_lists_of_numbers_are_to_be_tensors() -> None:
    found = collate([{"x": [1, 2]}, {"x": [1, 2, 3]}], Padding())
    assert isinstance(found, DataError)
    assert (found.what, found.remedy) == ("sample 0 of the batch gives a list of numbers", ONE_TENSOR)


SHAPES = Shapes([[parse_input("x", f"float32[{n}]"), parse_input("z", "float32[3]")] for n in (4, 8)], {"x": 5.0})


@pytest.mark.parametrize(("length", "number", "padded"), [(1, 0, 4), (4, 0, 4), (5, 1, 8), (8, 1, 8)])
def test_the_first_graph_that_is_long_enough_takes_a_batch(length: int, number: int, padded: int) -> None:
    batch = {"x": torch.zeros(2, length), "z": torch.zeros(2, 3)}
    assert SHAPES.first_for(batch) == number
    found = SHAPES.padded(batch, number)
    assert (found["x"].shape, found["z"].shape) == ((2, padded), (2, 3))
    assert found["x"][:, length:].eq(5).all()


class _Texts(Dataset[Tensor]):
    """Of random lengths, which a seed decides."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1 + int(torch.randint(7, ())))


def _lengths(order: Order, epoch: int) -> list[int]:
    return [order._lengths[index] for index in order.begin(epoch)]


def test_batches_have_samples_of_similar_lengths_alike_on_all_ranks() -> None:
    data = WatchedDataset(_Texts(), "texts")
    one, other = (Order(data, 5, size, shuffle=True, by_length=True) for size in (2, 8))
    torch.manual_seed(9)
    first, second = one.begin(0), one.begin(1)
    assert sorted(first) == sorted(second) == [*range(3000)]
    assert first != second
    assert other.begin(0) == first
    lengths = _lengths(one, 0)
    pieces = [lengths[start : start + 64] for start in range(0, 2048, 64)]
    assert all(piece == sorted(piece) for piece in pieces)
    assert pieces[:16] != sorted(pieces[:16])


@pytest.mark.parametrize("loader", [DataLoader(_Texts(), 4), None])
def test_what_has_an_order_keeps_it(loader: DataLoader[Tensor] | None) -> None:
    data = WatchedDataset(_Texts() if loader is None else loader, "texts")
    assert [*Order(data, shuffle=loader is not None, by_length=True).begin(0)] == [*range(3000)]


@pytest.mark.parametrize("buckets", [[64], [64, 64], [0, 64], [-1, 3], ["a", 2], 64])
def test_buckets_are_several_lengths(buckets: object) -> None:
    with pytest.raises((OptionError, ValueError), match=r"buckets"):
        DataOptions.model_validate({"buckets": buckets})


def test_padding_is_of_several_lengths() -> None:
    with pytest.raises((OptionError, ValueError), match=r"padding"):
        DataOptions.model_validate({"padding": {"x": 1}})
