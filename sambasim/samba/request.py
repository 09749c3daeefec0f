"""A compile request: the model, named inputs, optimizers and options, from what an app passes to the session."""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sambasim.compiler.fingerprint import fingerprint
from sambasim.compiler.update import Update
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.options.compile import BuildOptions, CompileOptions
from sambasim.options.load import build
from sambasim.options.training import TrainingOptions
from sambasim.samba.checks.place import app_line
from sambasim.samba.inputs import Inputs, check_on_host, flat, name_inputs
from sambasim.samba.notices import say_once
from sambasim.samba.optim import SGD, Adam, AdamW
from sambasim.samba.tensor import SambaTensor

Optimizer: TypeAlias = SGD | Adam | AdamW

FINGERPRINT, FINGERPRINT_OF_FORWARD = "step_sha256", "forward_sha256"
"""Keys of fingerprints of the model in the metadata of a PEF."""

LOSS_INDICES = "loss_indices"
"""The key of `loss_indices=` there."""

DTYPES = ("fp32", "bf16")
"""Choices of --dtype."""

_ALL_TILES = -1  # the default of --num-tiles


@dataclass(frozen=True, slots=True)
class Request:
    """A model with one batch of plain tensors by name, and how it is compiled."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    by_keyword: bool
    updates: tuple[Update, ...]
    options: CompileOptions
    loss_indices: tuple[int, ...] = ()


def request(
    model: nn.Module,
    inputs: Inputs,
    optimizers: Sequence[Optimizer],
    given: Mapping[str, object],
    *,
    inference: bool,
    loss_indices: Sequence[int] | int | None = None,
) -> Request:
    """The request for `model`.

    given: fields of BuildOptions; None is the default
    loss_indices: which outputs of the model are losses; None to find them

    Raises OptionError for options that do not fit together, DataError for inputs that have no common batch, and
    ModelError for a trained parameter that no optimizer has.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model must be an nn.Module, not {type(model).__name__}",
            where=app_line(),
            remedy="give the model, and then its inputs",
        )
    named, by_keyword = name_inputs(model, inputs)
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    named = {name: _as_computed(tensor, kinds) for name, tensor in named.items()}
    updates = () if inference else tuple(_updates(model, optimizers))
    first = optimizers[0].options()[0] if updates else None
    parts: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    parts |= {
        "inference": inference,
        "optimizer": first,
        "training": TrainingOptions(batch_size=_batch_size(inputs, named)),
    }
    return Request(model, named, by_keyword, updates, build(CompileOptions, parts), _indices(loss_indices))


def fingerprint_of(asked: Request) -> dict[str, str]:
    """The fingerprint of `asked` under its key in the metadata; empty for a model that has none."""
    digest = fingerprint(
        asked.model,
        asked.inputs,
        asked.updates,
        by_keyword=asked.by_keyword,
        dtype=asked.options.dtype,
        loss_indices=asked.loss_indices,
    )
    return {} if digest is None else {FINGERPRINT if asked.updates else FINGERPRINT_OF_FORWARD: digest}


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside nn.DataParallel, with a notice; any other module as it is."""
    while isinstance(model, nn.DataParallel):
        say_once("nn.DataParallel", "the model inside it is used; --data-parallel makes replicas", app_line())
        model = model.module
    return model


def as_mapping(name: str, value: object) -> Mapping[Any, Any]:
    """A dictionary, or the values of a Namespace; empty for None. Raises OptionError for any other value of `name`."""
    if value is None:
        return {}
    if isinstance(value, Namespace):
        return vars(value)
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{name} must have names with values, and is {type(value).__name__}",
            where=app_line(),
            remedy=f"{name}=vars(args), with what parse_app_args returned",
        )
    return value


def as_sequence(optimizers: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """One optimizer, several or none, as a list. Raises OptionError for one that is not of `samba.optim`."""
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for one in listed:
        if not isinstance(one, Optimizer):
            raise OptionError(
                f"{type(one).__module__}.{type(one).__name__} cannot be compiled",
                remedy="use samba.optim.SGD, samba.optim.Adam or samba.optim.AdamW",
            )
    return listed


def build_fields(config: Mapping[str, object], name: str) -> dict[str, object]:
    """The fields of BuildOptions in an app's arguments; `name` is the default name of the PEF."""
    level = "o0" if config.get("o0") else "o1" if config.get("o1") else None
    dtype = config.get("dtype")
    given = {
        "pef_name": config.get("pef_name") or name,
        "output_folder": config.get("output_folder"),
        "data_parallel": config.get("data_parallel"),
        "world_size": config.get("world_size") if config.get("data_parallel") else None,
        "opt_level": level,
        "arch": config.get("arch"),
        "num_tiles": None if config.get("num_tiles") == _ALL_TILES else config.get("num_tiles"),
        "dtype": dtype if dtype in DTYPES else None,  # an app may have a flag of its own by that name
        "stochastic_rounding": config.get("enable_stoc_rounding"),
        "gradient_groups": config.get("gradient_groups"),
    }
    folder = given["output_folder"]
    return {**given, "output_folder": None if folder is None else Path(str(folder))}


def build_fields_of(compile_options: Mapping[str, object]) -> dict[str, object]:
    """The fields of BuildOptions in the options of a PEF."""
    names = set(BuildOptions.model_fields) - {"output_folder", "inference"}
    return {name: value for name, value in compile_options.items() if name in names}


def _indices(given: Sequence[int] | int | None) -> tuple[int, ...]:
    listed = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(one, int) for one in listed):
        raise OptionError(
            f"loss_indices must be whole numbers, not {given!r}", where=app_line(), remedy="loss_indices=[0]"
        )
    return listed


def _as_computed(tensor: Tensor, parameters: set[torch.dtype]) -> Tensor:
    """An input in the type in which PyTorch computes: int16 labels as int64; bfloat16 and float32 inputs in the type of
    all `parameters`."""
    if tensor.dtype is torch.int16:
        return tensor.long()
    if tensor.dtype in (torch.bfloat16, torch.float32) and len(parameters) == 1:
        wanted = next(iter(parameters))
        if tensor.dtype is torch.float32 and wanted is torch.bfloat16:
            why = "they are rounded to bfloat16, the type of the parameters"
            say_once("the type of float32 inputs", why, app_line())
        return tensor.to(wanted)
    return tensor


def _batch_size(inputs: Inputs, named: Mapping[str, Tensor]) -> int:
    """The size of the first axis of all inputs."""
    if not named:
        raise DataError("the model has no inputs", remedy="pass inputs= a list of SambaTensors")
    for name, tensor in zip(named, flat(inputs), strict=True):
        check_on_host(name, tensor)
        axis = tensor.batch_dim if isinstance(tensor, SambaTensor) else None
        if axis not in (None, 0):
            raise DataError(
                f"the batch of {name} is along axis {axis}, but a replica's batch must come first",
                remedy=f"transpose {name} in the model, and give it with batch_dim=0",
            )
        if tensor.ndim == 0:
            raise DataError(
                f"{name} is a single number, without a batch", remedy=f"give {name} one value for each sample"
            )
    sizes = {name: tensor.shape[0] for name, tensor in named.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(f"inputs have batches of different sizes: {listed}", remedy="give all inputs one batch size")
    return next(iter(sizes.values()))


def _updates(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterable[Update]:
    """An update for each parameter group with trained parameters."""
    if not optimizers:
        raise OptionError(
            "training needs an optimizer",
            where=app_line(),
            remedy="pass samba.optim.SGD(model.parameters(), …) as the third argument; or, to predict, --inference, "
            "and inference=True in config_dict",
        )
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    updated: set[str] = set()
    for optimizer in optimizers:
        for group, options in zip(optimizer.param_groups, optimizer.options(), strict=True):
            names = frozenset(paths[id(p)] for p in group["params"] if id(p) in paths and p.requires_grad)
            strangers = sum(id(p) not in paths for p in group["params"])
            if strangers:
                raise ModelError(
                    f"{type(optimizer).__name__} updates {strangers} parameters that the model does not have",
                    remedy="make the optimizer after the model is complete, from model.parameters()",
                )
            twice = sorted(updated & names)
            if twice:
                raise ModelError(
                    f"two optimizers, or groups, update {twice[0]}", remedy="give each parameter to one of them"
                )
            updated |= names
            if names:
                yield Update(options.name, options.hyperparameters(), names)
    missing = [path for path, p in model.named_parameters() if p.requires_grad and path not in updated]
    if missing:
        raise ModelError(
            f"no optimizer updates {', '.join(missing[:3])}{' …' * (len(missing) > 3)}",
            remedy="give them to an optimizer, or freeze them: parameter.requires_grad_(False)",
        )
