"""Detection: pictures with some boxes each, which a collate function pads to a fixed number, and a loss of its own of
those that are there."""

# Calling a module gives Any.
# mypy: no-warn-return-any, allow-untyped-calls

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss
from torch.utils.data import DataLoader, Dataset

from tests.parity.scripts import BATCH, STEPS, Built, Trained, generator

MOST, CLASSES, SIDE = 5, 4, 8
ACCUMULATED = 1


class Pictures(Dataset[dict[str, Any]]):
    """Picture i has 1 + i % MOST boxes, each with a label, and a name."""

    def __init__(self) -> None:
        count = STEPS * BATCH
        self.pictures = torch.rand(count, 3, SIDE, SIDE, generator=generator())
        self.boxes = torch.rand(count, MOST, 4, generator=generator(2))
        self.labels = torch.randint(CLASSES, (count, MOST), generator=generator(3))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        there = 1 + index % MOST
        boxes, labels = self.boxes[index, :there], self.labels[index, :there]
        return {"image": self.pictures[index], "boxes": boxes, "labels": labels, "name": f"{index}.png"}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    def padded(name: str, value: int) -> Tensor:
        rows = torch.full((len(samples), MOST, *samples[0][name].shape[1:]), value, dtype=samples[0][name].dtype)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample[name])] = sample[name]
        return rows

    images, names = torch.stack([one["image"] for one in samples]), [one["name"] for one in samples]
    return {"image": images, "boxes": padded("boxes", 0), "labels": padded("labels", -1), "name": names}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 64), nn.ReLU())
        self.of_boxes, self.of_labels = nn.Linear(64, MOST * 4), nn.Linear(64, MOST * CLASSES)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(image)
        return self.of_boxes(features).view(-1, MOST, 4), self.of_labels(features).view(-1, MOST, CLASSES)


def loss(outputs: tuple[Tensor, Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
    """The mean over pictures of that over the boxes that are there."""
    there = (labels >= 0).float()
    of_boxes = smooth_l1_loss(outputs[0], boxes, reduction="none").sum(2)
    of_labels = cross_entropy(outputs[1].transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (((of_boxes + of_labels) * there).sum(1) / there.sum(1)).mean()


HOW = {"loss": loss}


def build() -> Built:
    torch.manual_seed(0)
    model = Detector()
    return Built(model, [torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)], [])


def data() -> tuple[DataLoader[Any], None]:
    return DataLoader(Pictures(), BATCH, shuffle=True, generator=generator(4), collate_fn=collate), None


def in_pytorch(replicas: int) -> Trained:
    model, (optimizer,), _ = build()
    losses = []
    for batch in data()[0]:
        value = loss(model(batch["image"]), batch["boxes"], batch["labels"])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return Trained(losses, model.state_dict())
