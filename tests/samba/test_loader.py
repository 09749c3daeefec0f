"""SambaLoader: a DataLoader's batches as named tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sambasim.errors import DataError
from sambasim.samba import SambaTensor
from sambasim.samba.sambaloader import SambaLoader

IMAGES, LABELS = torch.randn(10, 3), torch.arange(10)


def loader() -> "DataLoader[Any]":
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)


def test_batches_are_named_samba_tensors() -> None:
    batches = list(SambaLoader(loader(), ["image", "label"]))
    for image, label in batches:
        assert isinstance(image, SambaTensor)
        assert isinstance(label, SambaTensor)
        assert (image.name, image.batch_dim) == ("image", 0)
        assert (label.name, label.batch_dim) == ("label", 0)
    assert torch.cat([image.torch() for image, _ in batches]).equal(IMAGES)
    assert torch.cat([label.torch() for _, label in batches]).equal(LABELS)


def test_it_is_as_long_as_the_loader_and_can_be_read_again() -> None:
    batches = SambaLoader(loader(), ["image", "label"])
    assert len(batches) == 3
    assert len(list(batches)) == len(list(batches)) == 3


def test_it_shows_the_loader_and_its_sampler() -> None:
    torch_loader = loader()
    assert SambaLoader(torch_loader, ["image", "label"]).torch_loader is torch_loader


def test_a_hook_maps_each_batch_and_the_original_is_returned_beside_it() -> None:
    batches = SambaLoader(loader(), ["image"], function_hook=lambda batch: [2 * batch[0]], return_original_batch=True)
    for [image], original in batches:
        assert image.name == "image"
        assert image.torch().equal(2 * original[0])
        assert len(original) == 2
    assert len(batches) == 3


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
        ([[IMAGES, LABELS]], ["image"], "a batch has 2 values, and SambaLoader was given 1 name: image"),
        ([IMAGES], ["image", "label"], "a batch has 1 value, and SambaLoader was given 2 names: image, label"),
        ([{"x": IMAGES}], ["x", "y"], "a batch has no y; it has x"),
        ([[IMAGES, ["a", "b"]]], ["image", "word"], "word is of type list in a batch, and a session takes tensors"),
        ([IMAGES], "image", "the names must be a list, and they are 'image'"),
        ([IMAGES], 1, "the names must be a list, and they are 1"),
        (3, ["image"], "SambaLoader was given an object of type int, which has no batches"),
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


def test_an_iterator_has_no_length() -> None:
    with pytest.raises(TypeError, match="list_iterator has no length"):
        len(SambaLoader(iter([IMAGES]), ["image"]))
