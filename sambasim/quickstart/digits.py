"""The quick start: a small convolutional network learns to classify 8 by 8 images of handwritten digits.

The data are 1,797 images of a UCI data set; see the README of this folder.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

IMAGES = Path(__file__).with_name("optical_digits.npz")
CLASSES = 10
LARGEST_PIXEL = 16
HELD_OUT = 360
SPLIT_SEED = 1998
"""Constant, because the choice of held-out images belongs to the data set, not to a run."""


class DigitsClassifier(nn.Module):
    """Images `[batch, 1, 8, 8]`, float32 in 0..1, to logits `[batch, 10]`."""

    def __init__(self, width: int = 32, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width * 4 * 4, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        features = self.features(image).flatten(1)
        logits: Tensor = self.classifier(self.dropout(features))
        return logits


class DigitImages(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is `(image, label)`: float32 `[1, 8, 8]` in 0..1, and int64 `[]` in 0..9."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        # One indexing operation for the whole batch instead of one per sample.
        chosen = torch.tensor(indices)
        return list(zip(self.images[chosen].unbind(0), self.labels[chosen].unbind(0), strict=True))


def digits() -> tuple[DigitImages, DigitImages]:
    """The 1,437 training images and the 360 held-out images. The split is constant; both have all classes."""
    with np.load(IMAGES, allow_pickle=False) as held:
        pixels, classes = held["images"], held["labels"]
    # Shuffled, because the set is sorted by writer. NumPy guarantees that the stream of RandomState never changes.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(classes))
    images = torch.from_numpy(pixels[order].astype(np.float32) / LARGEST_PIXEL).unsqueeze(1)
    labels = torch.from_numpy(classes[order].astype(np.int64))
    return DigitImages(images[HELD_OUT:], labels[HELD_OUT:]), DigitImages(images[:HELD_OUT], labels[:HELD_OUT])
