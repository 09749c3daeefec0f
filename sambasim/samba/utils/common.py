"""Functions of `samba.utils`: ranks, seeds, weight normalization, `common_app_driver`; and the loaders of MNIST."""

import gzip
import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from sambasim.errors import DataError, ModelError, OptionError, UserError
from sambasim.runtime.machine.process import seed_everything
from sambasim.samba.flags import MEASURE_PERFORMANCE, MEASURING
from sambasim.samba.inputs import Inputs
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error, current, type_error
from sambasim.samba.request import Optimizer, as_mapping
from sambasim.samba.session import session
from sambasim.samba.trace import trace_graph
from sambasim.samba.utils.measuring import measure_performance, measure_sections
from sambasim.samba.utils.parser import get_pef_info, get_pefmeta, get_pefmeta_dict

__all__ = [
    "common_app_driver", "compile", "get_file_dir", "get_pef_info", "get_pefmeta", "get_pefmeta_dict", "get_rank",
    "get_world_size", "is_main_process", "set_seed", "weight_norm_",
]  # fmt: skip


def get_rank() -> int:
    """The rank of this process; 0 before the ranks are connected, and in a single process."""
    return current().rank


def get_world_size() -> int:
    """The number of ranks; 1 before they are connected, and in a single process."""
    return current().world_size


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes shared files."""
    return get_rank() == 0


def set_seed(seed: int) -> None:
    """Seeds torch, numpy and random on this rank. The same seed on all ranks makes the same weights. Raises UserError
    unless `seed` is a whole number of at least 0."""
    if not isinstance(seed, Integral) or seed < 0:
        raise app_error(UserError, f"a seed is a whole number of at least 0, not {seed!r}", "utils.set_seed(1)")
    seed_everything(int(seed))


def seed_from_environment() -> None:
    """`set_seed` with the environment variable SAMBA_SEED, if it is set. Raises OptionError for a bad value."""
    text = os.environ.get("SAMBA_SEED")
    if text and not text.isdecimal():
        what = f"SAMBA_SEED is {text!r} in the environment, and a seed is a whole number of at least 0"
        raise OptionError(what, remedy="export SAMBA_SEED=256, or unset SAMBA_SEED")
    if text:
        set_seed(int(text))


def get_file_dir(file: str | os.PathLike[str]) -> str:
    """The absolute path of the folder that `file` is in: `get_file_dir(__file__)`."""
    return str(Path(file).resolve().parent)


def weight_norm_(module: nn.Module) -> nn.Module:
    """Replaces each weight in `module` (a parameter `weight` of two dimensions or more), in place, by a trained
    magnitude for each output and a trained direction. Call it before the optimizer is made. Returns `module`. Source:
    Salimans & Kingma, Weight Normalization, NeurIPS 2016, arXiv:1602.07868."""
    if not isinstance(module, nn.Module):
        raise type_error(ModelError, "weight_norm_ takes a torch.nn.Module", module, "weight_norm_(model.layer)")
    owners: dict[Tensor, str] = {}
    for path, inner in module.named_modules():
        weight = inner._parameters.get("weight")
        if weight is not None and weight.dim() > 1 and owners.setdefault(weight, path) != path:
            what = f"{owners[weight]} and {path} share one weight, and normalized they would have two"
            raise app_error(ModelError, what, "call weight_norm_ on the parts of the model that share nothing")
    if not owners:
        what = f"{type(module).__name__} has no weight to normalize"
        raise app_error(ModelError, what, "give weight_norm_ a module with Linear or convolution layers, once")
    for path in owners.values():
        parametrizations.weight_norm(module.get_submodule(path))
    return module


@checks_keywords()
def common_app_driver(
    args: Namespace,
    model: nn.Module,
    inputs: Inputs,
    optim: Optimizer | Sequence[Optimizer] | None = None,
    name: str | None = None,
    app_dir: str | Path | None = None,
    init_output_grads: bool = True,
    squeeze_bs_dim: bool = False,
    get_output_grads: bool = True,
) -> None:
    """Does `args.command` if it is compile, measure-performance or measure-sections; run and test are left to the app.
    No effect: init_output_grads, squeeze_bs_dim, get_output_grads."""
    if args.command == "compile":
        compile(args, model, inputs, None if args.inference else optim, name, app_dir)
    elif args.command in MEASURING:
        # With --inference too: of a training PEF only the forward runs.
        trace_graph(model, inputs, optim, pef=args.pef, mapping=args.mapping)
        measure = measure_performance if args.command == MEASURE_PERFORMANCE else measure_sections
        names = ("json", "bench_report_json", "compiled_stats_json", "inference", "run_graph_only", "min_duration")
        options: Any = {name: getattr(args, name) for name in (*names, "data_parallel", "reduce_on_rdu")}
        measure(model, inputs, args.batch_size, n_iterations=args.num_iterations, **options)


@checks_keywords()
def compile(
    args: Namespace,
    model: nn.Module,
    inputs: Inputs,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    name: str | None = None,
    app_dir: str | Path | None = None,
) -> str:
    """`session.compile` with the arguments of the command line. Returns the absolute path of the PEF."""
    metadata = get_pefmeta(args, model)
    return session.compile(model, inputs, optimizer, name, app_dir, config_dict=vars(args), pef_metadata=metadata)


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

    With --data-parallel each replica has its share of the training data. Nothing is downloaded."""
    given = as_mapping("params", params)
    batch_size = int(str(given.get("batch_size", 1)))
    if train_dataset is None or test_dataset is None:
        folder = given.get("data_dir") or given.get("data_folder") or given.get("data_path")
        if not folder:
            what = "params has no folder of MNIST: it has none of data_dir, data_folder, data_path"
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
    files = [place / f"{name}{end}" for place in (folder, folder / "MNIST" / "raw") for end in ("", ".gz")]
    path = next(filter(Path.is_file, files), None)
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
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    channel = 0 if isinstance(image, Tensor) else -1
    if pixels.ndim == 2:
        pixels = pixels.unsqueeze(channel)
    if pixels.ndim != 3 or pixels.shape[channel] != 1:
        what = f"an image has the shape {tuple(pixels.shape)}, and images like MNIST's have one channel"
        raise DataError(what, remedy="give grey images, of height × width")
    grey = pixels.select(channel, 0).unsqueeze(0)
    return grey.float() / 255 if grey.dtype == torch.uint8 else grey.float()
