"""The quick start's data is what its README says."""

import torch

from sambasim.data.datasets import open_source
from sambasim.options.training import DataOptions
from sambasim.quickstart.digits import digits


def test_the_images_are_the_1797_and_always_split_alike() -> None:
    train, held_out = digits()
    assert (len(train), len(held_out)) == (1437, 360)
    description = open_source(DataOptions(source="digits"), None).description
    assert description == "digits: 1,437 samples to train, 360 held out"
    image, label = train[0]
    assert (image.dtype, image.shape) == (torch.float32, (1, 8, 8))
    assert (label.dtype, label.shape) == (torch.int64, ())
    images, labels = map(torch.cat, zip(train.tensors, held_out.tensors, strict=True))
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert torch.equal(images * 16, (images * 16).round()), "seventeen levels"
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert held_out.tensors[1].bincount(minlength=10).min() >= 20
    assert torch.equal(digits()[1].tensors[0], held_out.tensors[0])
    # No two images are equal, so equal ones in both sets would be a leak.
    assert len({tuple(row) for row in images.flatten(1).tolist()}) == 1797
