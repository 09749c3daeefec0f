"""The held-out loss is torch's over the whole set, whatever it counts and however many replicas share the set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sambasim as ss

SAMPLES, CLASSES, LENGTH = 22, 5, 6
WEIGHT = torch.tensor([0.1, 2.0, 0.7, 3.0, 1.0])


class Tagger(nn.Module):
    """Classes of each place of a sequence, in torch's order: [batch, classes, places]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        classes: Tensor = self.head(self.embedding(tokens))
        return classes.transpose(1, 2)


def data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(9, (samples, LENGTH), generator=generator)
    tags = torch.randint(CLASSES, (samples, LENGTH), generator=generator)
    padded = torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    return tokens, tags.masked_fill(padded, -100)


LOSSES = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(weight=WEIGHT),
    nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=3, label_smoothing=0.1),
]


@pytest.mark.parametrize("loss", LOSSES, ids=["padded", "weighted", "smoothed"])
@pytest.mark.usefixtures("one_thread")
def test_of_classes(loss: nn.CrossEntropyLoss, tmp_path: Path) -> None:
    tokens, tags = data()
    tags = tags.clamp(min=0) if loss.ignore_index == 3 else tags
    model = Tagger()
    pef = ss.compile(model, (tokens[:4], tags[:4]), loss=loss, output_folder=tmp_path, quiet=True, data_parallel=True)
    with torch.no_grad():
        wanted, guessed = float(loss(model(tokens), tags)), model(tokens).argmax(1)
    counted = tags.ne(loss.ignore_index)
    right = float(guessed.eq(tags)[counted].double().mean())
    run: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "epochs": 1, "threads": 1, "quiet": True}
    found = [ss.run(pef, ((tokens, tags), (tokens, tags)), replicas=n, **run).evaluations[0] for n in (1, 2, 4)]
    assert [one.loss for one in found] == pytest.approx([wanted] * 3, rel=1e-6)
    assert found[0].loss == found[1].loss == found[2].loss
    assert [one.accuracy for one in found] == pytest.approx([right] * 3)


@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_of_one_class_a_sample(function: Callable[..., Tensor], tmp_path: Path) -> None:
    x, y = torch.randn(SAMPLES, 3), torch.arange(SAMPLES) % 3
    y[::4] = -100
    model = nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1))
    pef = ss.compile(model, (x[:4], y[:4]), loss=function, output_folder=tmp_path, quiet=True, check=1)
    run = ss.run(pef, ((x, y), (x, y)), lr=0.0, weight_decay=0.0, epochs=1, quiet=True)
    assert run.evaluations[0].loss == pytest.approx(float(function(model(x), y).detach()), rel=1e-6)
