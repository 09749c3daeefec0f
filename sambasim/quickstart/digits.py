"""The quick start: a small convolutional network learns to classify 8 by 8 images of handwritten digits.

The data are 1,797 images of a UCI data set; see the README of this folder.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

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
        first, second = (
            [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            for inputs, outputs in ((1, width), (width, 2 * width))
        )
        self.features = nn.Sequential(*first, *second, nn.MaxPool2d(2))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width * 4 * 4, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(self.features(image).flatten(1)))
        return logits


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 training images and 360 held-out ones, float32 `[1, 8, 8]` in 0..1, with labels, int64 `[]` in 0..9.
    The split is constant, and both have all classes."""
    with np.load(IMAGES, allow_pickle=False) as held:
        pixels, classes = held["images"], held["labels"]
    # Shuffled, because the set is sorted by writer. NumPy guarantees that the stream of RandomState never changes.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(classes))
    images = torch.from_numpy(pixels[order].astype(np.float32) / LARGEST_PIXEL).unsqueeze(1)
    labels = torch.from_numpy(classes[order].astype(np.int64))
    return TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]), TensorDataset(images[:HELD_OUT], labels[:HELD_OUT])
