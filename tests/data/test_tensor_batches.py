"""A TensorDataset read by rows gives the bits that reading it sample by sample gives."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from sambasim.data.samples import WatchedDataset
from sambasim.data.tensor_batches import tensor_batches


class Noisy(TensorDataset):
    """It runs code of its own, which may draw random numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] + torch.rand(()) for tensor in self.tensors)


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(11, 3, 2, generator=generator), torch.arange(11))


def test_batches_are_those_of_samples_put_together() -> None:
    dataset = _dataset()
    chosen = [10, 3, 5, 7, 0, 1, 2]
    fast = tensor_batches(WatchedDataset(dataset, "here", chosen))
    assert fast is not None
    order = [6, 0, 2, 1, 5]
    batches = list(fast.batches(order, 2))
    assert len(batches) == 2, "the last, which is not full, is left out"
    for number, batch in enumerate(batches):
        samples = [dataset[chosen[position]] for position in order[2 * number : 2 * number + 2]]
        for ours, theirs in zip(batch, default_collate(samples), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype is theirs.dtype


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 5, 100])
def test_rows_that_are_read_ahead_come_in_the_same_batches(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    row_bytes = 3 * 2 * 4 + 8
    monkeypatch.setattr("sambasim.data.tensor_batches._AHEAD_BYTES", ahead * 2 * row_bytes)
    fast = tensor_batches(WatchedDataset(_dataset(), "here"))
    assert fast is not None
    batches = list(fast.batches(list(range(10, -1, -1)), 2))
    assert [numbers.tolist() for _, numbers in batches] == [[10, 9], [8, 7], [6, 5], [4, 3], [2, 1]]
    assert all(torch.equal(values, _dataset().tensors[0][numbers]) for values, numbers in batches)


def test_a_dataset_with_code_of_its_own_is_read_by_that_code() -> None:
    assert tensor_batches(WatchedDataset(Noisy(torch.zeros(4, 2)), "here")) is None
    assert tensor_batches(WatchedDataset([torch.zeros(2)] * 4, "here")) is None


def test_tensors_that_ask_for_gradients_are_left_to_their_dataset() -> None:
    assert tensor_batches(WatchedDataset(TensorDataset(torch.zeros(4, 2, requires_grad=True)), "here")) is None
