"""SambaLoader: a DataLoader's batches as named tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sambasim.errors import DataError
from sambasim.samba.inputs import SambaLoader

IMAGES, LABELS = torch.randn(10, 3), torch.arange(10)


def loader() -> "DataLoader[Any]":
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)


class Custom:
    """A loader of an app's own, without a length."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 2:
            raise IndexError
        return IMAGES, LABELS


def test_anything_to_iterate_over_is_a_loader() -> None:
    batches = SambaLoader(Custom(), ["image", "label"])  # type: ignore[arg-type]  # an iterable by __getitem__
    assert [label.name for _, label in batches] == ["label", "label"]
    with pytest.raises(TypeError, match="Custom has no length"):
        len(batches)


def test_a_mapping_is_read_by_name() -> None:
    [[label, image]] = SambaLoader([{"image": IMAGES, "index": 1, "label": LABELS}], ["label", "image"])
    assert label.torch().equal(LABELS)
    assert image.torch().equal(IMAGES)


def test_a_batch_may_be_one_tensor_and_a_tensor_one_number() -> None:
    [[image]] = SambaLoader([IMAGES], ["image"])
    assert image.torch().equal(IMAGES)
    [[scale]] = SambaLoader([torch.tensor(2.0)], ["scale"])
    assert (scale.name, scale.batch_dim) == ("scale", None)


@pytest.mark.parametrize(
    ("batches", "names", "what"),
    [
        ([[IMAGES, LABELS]], ["image"], "a batch has 2 values, and SambaLoader 1 name: image"),
        ([IMAGES], ["image", "label"], "a batch has 1 value, and SambaLoader 2 names: image, label"),
        ([{"x": IMAGES}], ["x", "y"], "a batch has no y; it has x"),
        ([[IMAGES, ["a", "b"]]], ["image", "word"], "word of a batch must be a tensor, not list"),
        ([IMAGES], "image", "the names must be a list, not 'image'"),
        ([IMAGES], 1, "the names must be a list, not 1"),
        (3, ["image"], "SambaLoader needs a loader of batches, not int"),
    ],
)
def test_batches_that_do_not_fit_the_names_are_refused(batches: Any, names: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"^{what}") as caught:
        list(SambaLoader(batches, names))
    assert str(caught.value.where).startswith(__file__)
    assert caught.value.remedy


def test_a_sampler_of_one_replica_has_rank_0_unless_a_rank_is_given() -> None:
    dataset = TensorDataset(IMAGES)
    assert DistributedSampler(dataset, num_replicas=1, shuffle=False).rank == 0
    assert list(DistributedSampler(dataset, 2, 1, shuffle=False)) == [1, 3, 5, 7, 9]
    with pytest.raises(ValueError, match="Invalid rank 3"):
        DistributedSampler(dataset, num_replicas=1, rank=3)
