"""`samba.utils.dataset.mnist`: the transform and the loaders of MNIST, and of other images with one channel."""

import gzip
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from sambasim.errors import DataError
from sambasim.samba.process import app_error
from sambasim.samba.request import as_mapping

__all__ = ["dataset_transform", "prepare_dataloader"]

_FOLDERS = ("data_dir", "data_folder", "data_path")
"""Arguments of apps for the folder of the data."""


def dataset_transform(args: Namespace | Mapping[str, object]) -> Callable[[Any], Tensor]:
    """A function that scales an image to 0..1 and normalizes it by MNIST's mean and deviation, to `[num_features]` if
    `args` has that, or else to `[1, height, width]`. The image is Pillow's, an array or a tensor: `[height, width]`, or
    with one channel, last in arrays and first in tensors. The transform raises DataError for another shape."""
    features = as_mapping("args", args).get("num_features")

    def transform(image: Any) -> Tensor:
        normalized = (_pixels(image) - 0.1307) / 0.3081  # of MNIST's training images, with pixels in 0..1
        if features not in (None, normalized.numel()):
            what = f"an image has {normalized.numel()} pixels, and num_features is {features}"
            raise DataError(what, remedy=f"--num-features {normalized.numel()}, or other images")
        return normalized if features is None else normalized.flatten()

    return transform


def prepare_dataloader(
    params: Namespace | Mapping[str, object],
    train_dataset: Dataset[Any] | None = None,
    test_dataset: Dataset[Any] | None = None,
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of the training and the test data, in whole batches of `batch_size`; the training data is shuffled.

    train_dataset, test_dataset: by default MNIST, from the four idx files, plain or .gz, in the folder `data_dir`,
        `data_folder` or `data_path` of `params`, or in MNIST/raw below it, transformed by `dataset_transform`

    With --data-parallel each replica has its share of the training data. Nothing is downloaded: raises DataError if the
    files are not there, or are not MNIST's."""
    given = as_mapping("params", params)
    batch_size = int(str(given.get("batch_size", 1)))
    if train_dataset is None or test_dataset is None:
        folder = next((given[name] for name in _FOLDERS if given.get(name)), None)
        if folder is None:
            what = f"params has no folder of MNIST: it has none of {', '.join(_FOLDERS)}"
            raise app_error(DataError, what, "prepare_dataloader(params, train, test), or add the flag --data-dir")
        train_dataset = _read_mnist(Path(str(folder)), "train", given) if train_dataset is None else train_dataset
        test_dataset = _read_mnist(Path(str(folder)), "t10k", given) if test_dataset is None else test_dataset
    sampler: Any = DistributedSampler(train_dataset, drop_last=True) if dist.is_initialized() else None
    train = DataLoader(train_dataset, batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)
    return train, DataLoader(test_dataset, batch_size, drop_last=True)


def _read_mnist(folder: Path, part: str, args: Mapping[str, object]) -> TensorDataset:
    images = _read_idx(folder, f"{part}-images-idx3-ubyte", axes=3)
    labels = _read_idx(folder, f"{part}-labels-idx1-ubyte", axes=1)
    if len(images) != len(labels):
        what = f"{folder} has {len(images)} images and {len(labels)} labels of {part}"
        raise DataError(what, remedy="copy the files of MNIST again")
    transform = dataset_transform(args)
    return TensorDataset(torch.stack([transform(image) for image in images]), labels.long())


def _read_idx(folder: Path, name: str, axes: int) -> Tensor:
    """The unsigned bytes of an idx file: a header of 0, 0, the type 8, the number of axes, and their lengths as
    big-endian 32-bit numbers, then the data. Source: http://yann.lecun.com/exdb/mnist."""
    places = [place / f"{name}{end}" for place in (folder, folder / "MNIST" / "raw") for end in ("", ".gz")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        what = f"{folder} has no {name}, {name}.gz, or MNIST/raw with one of them"
        raise app_error(DataError, what, "copy the four files of MNIST there; sambasim downloads nothing")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="copy the file of MNIST again") from error
    begin = 4 + 4 * axes
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, begin, 4)]
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) != begin + math.prod(shape):
        raise DataError(f"{path} is no idx file of MNIST", remedy="copy the file of MNIST again")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=begin).reshape(shape).copy())


def _pixels(image: Any) -> Tensor:
    """Float32, `[1, height, width]`."""
    given = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    channel = 0 if isinstance(image, Tensor) else -1
    if given.ndim == 2:
        given = given.unsqueeze(channel)
    if given.ndim != 3 or given.shape[channel] != 1:
        what = f"an image has the shape {tuple(given.shape)}, and images like MNIST's have one channel"
        raise DataError(what, remedy="give grey images, of height × width")
    grey = given.select(channel, 0).unsqueeze(0)
    return grey.float() / 255 if grey.dtype == torch.uint8 else grey.float()
