"""The transform for images like those of MNIST: one channel, written dark on light."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sambasim.errors import DataError

__all__ = ["dataset_transform"]

_MEAN, _DEVIATION = 0.1307, 0.3081
"""Of MNIST's training images, with pixels in 0..1."""

_LARGEST_PIXEL = 255


def dataset_transform(args: Mapping[str, object]) -> Callable[[Any], Tensor]:
    """What makes of an image a tensor: in 0..1 if its pixels are bytes, then with MNIST's mean and deviation taken out.

    args: `vars(args)` of the app; with `num_features` in it the result is flat, `[num_features]`, else `[1, height,
        width]`

    The image is one of Pillow, an array or a tensor: `[height, width]`, or arrays with the channel last, as Pillow has
    it, and tensors with the channel first, as torch has it. The transform raises DataError for another number of
    channels than one, and where the pixels are not `num_features`.
    """
    features = args.get("num_features")

    def transform(image: Any) -> Tensor:
        pixels = _pixels(image)
        normalised = (pixels - _MEAN) / _DEVIATION
        if features is None:
            return normalised
        if normalised.numel() != features:
            raise DataError(
                f"an image has {normalised.numel()} pixels, and num_features is {features}",
                remedy=f"--num-features {normalised.numel()}, or other images",
            )
        return normalised.flatten()

    return transform


def _pixels(image: Any) -> Tensor:
    """Float32, `[1, height, width]`."""
    given = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    channel = 0 if isinstance(image, Tensor) else -1
    if given.ndim == 2:
        given = given.unsqueeze(channel)
    if given.ndim != 3 or given.shape[channel] != 1:
        raise DataError(
            f"an image has the shape {tuple(given.shape)}, and images like MNIST's have one channel",
            remedy="give grey images, of height × width",
        )
    grey = given.select(channel, 0).unsqueeze(0)
    return grey.float() / _LARGEST_PIXEL if grey.dtype == torch.uint8 else grey.float()
