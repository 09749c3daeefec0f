"""The quick start's data is what its README says, and its model learns it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from sambasim.data.sources import open_source
from sambasim.options.compile import compile_options
from sambasim.options.training import DataOptions
from sambasim.quickstart.digits import DigitsClassifier, digits


def test_the_images_are_the_1797_and_always_split_alike() -> None:
    train, held_out = digits()
    assert (len(train), len(held_out)) == (1437, 360)
    image, label = train[0]
    assert (image.dtype, image.shape) == (torch.float32, (1, 8, 8))
    assert (label.dtype, label.shape) == (torch.int64, ())
    images = torch.cat([train.images, held_out.images])
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert torch.equal(images * 16, (images * 16).round()), "seventeen levels"
    counts = torch.bincount(torch.cat([train.labels, held_out.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert held_out.labels.bincount(minlength=10).min() >= 20
    assert torch.equal(digits()[1].images, held_out.images)
    # No two images are equal, so equal ones in both sets would be a leak.
    assert len({tuple(row) for row in images.flatten(1).tolist()}) == 1797


def test_reading_many_at_once_is_reading_each() -> None:
    train, _ = digits()
    for (image, label), index in zip(train.__getitems__([5, 0, 1436]), (5, 0, 1436), strict=True):
        assert torch.equal(image, train[index][0])
        assert label == train[index][1]


def test_it_is_the_builtin_source() -> None:
    source = open_source(DataOptions(source="digits"), None)
    assert source.description == "digits: 1,437 samples to train, 360 held out"


@pytest.mark.timeout(120)
def test_it_learns_in_plain_pytorch_what_its_config_says() -> None:
    options = compile_options(None, None, [], {})
    assert options.optimizer is not None
    assert (options.optimizer.name, options.training.schedule.name) == ("adamw", "cosine")
    torch.manual_seed(options.training.seed)
    model = DigitsClassifier()
    train, held_out = digits()
    # A third of the epochs, at the global batch of two replicas, is enough to tell learning from guessing.
    loader = DataLoader(train, 2 * options.training.batch_size, shuffle=True, drop_last=True)
    epochs, warmup = 6, options.training.schedule.warmup_steps
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.optimizer.lr, weight_decay=options.optimizer.weight_decay
    )
    total = epochs * len(loader)

    def factor(step: int) -> float:
        return (
            (step + 1) / warmup if step < warmup else (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        correct = (model(held_out.images).argmax(1) == held_out.labels).float().mean().item()
    assert correct >= 0.97
