"""What an app asks the compiler for, in the compiler's words: inputs by name, optimizers, options."""

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sambasim.compiler.fingerprint import fingerprint
from sambasim.compiler.passes.optimizer import Update
from sambasim.compiler.step import forward_parameters
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.options.compile import BuildOptions, CompileOptions
from sambasim.options.load import build
from sambasim.options.training import OptimizerOptions, TrainingOptions
from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once
from sambasim.samba.optim import SGD, Adam, AdamW
from sambasim.samba.tensor import SambaTensor, to_torch

Inputs: TypeAlias = Tensor | Iterable[Tensor | None] | Mapping[str, Tensor | None]
Optimizer: TypeAlias = SGD | Adam | AdamW

FINGERPRINT, FINGERPRINT_OF_FORWARD = "step_sha256", "forward_sha256"
"""Under these words the metadata of a PEF has fingerprints of what it was compiled from."""

LOSS_INDICES = "loss_indices"
"""Under this word it has the outputs that the app called losses."""

_ALL_TILES = -1
"""What --num-tiles is unless it is typed."""

DTYPES = ("fp32", "bf16")
"""What --dtype takes."""


@dataclass(frozen=True, slots=True)
class Request:
    """A model with one batch of its inputs, plain tensors by name, and how it is compiled."""

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
    """What `model` and the rest come to. `given` are fields of BuildOptions, None where they are not given.

    loss_indices: which outputs of the model are losses; None where they are to be found

    Raises OptionError for options that do not fit together, DataError for inputs that have no common batch, and
    ModelError for a trained parameter that no optimizer has.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is of type {type(model).__name__}, and must be an nn.Module",
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
    """What `asked` compiles to, in 64 letters, under `FINGERPRINT`, or without updates under `FINGERPRINT_OF_FORWARD`;
    nothing for a step that cannot be told so."""
    told = fingerprint(
        asked.model,
        asked.inputs,
        asked.updates,
        by_keyword=asked.by_keyword,
        dtype=asked.options.dtype,
        loss_indices=asked.loss_indices,
    )
    return {} if told is None else {FINGERPRINT if asked.updates else FINGERPRINT_OF_FORWARD: told}


def name_inputs(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Tensor], bool]:
    """`inputs` as plain tensors by name, and whether the model takes them by name. A tensor without a name has that of
    the argument of `forward` at its place. An input that is None is left out, and `forward` takes its default.

    Raises ModelError for more inputs than `forward` takes, and DataError for two of one name, for something that is no
    tensor, and for None where `forward` has no default.
    """
    if isinstance(inputs, Mapping):
        _check_defaults(model, [name for name, one in inputs.items() if one is None])
        return {name: _tensor(name, one) for name, one in inputs.items() if one is not None}, True
    sequence = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    arguments = forward_parameters(model)
    if len(sequence) > len(arguments) and not _takes_any(model):
        raise ModelError(
            f"{len(sequence)} inputs are given, but {type(model).__name__}.forward takes {len(arguments)}: "
            f"{', '.join(arguments)}",
            where=app_line(),
            remedy="give as many inputs as forward takes, in its order",
        )
    places = [arguments[i] if i < len(arguments) else f"input_{i}" for i in range(len(sequence))]
    if any(one is None for one in sequence):
        named = {place: one for place, one in zip(places, sequence, strict=True) if one is not None}
        _check_defaults(model, [place for place in places if place not in named])
        misnamed = next((name for place, one in named.items() if (name := name_of(one)) not in (None, place)), None)
        if misnamed is not None:
            raise DataError(
                f"{places[sequence.index(None)]} is None, so the other inputs are passed by the names of forward's "
                f"arguments, and {misnamed} is none of them",
                where=app_line(),
                remedy=f"name the tensors as forward does: {', '.join(named)}",
            )
        return {name: _tensor(name, one) for name, one in named.items()}, True
    names = [name_of(one) or place for one, place in zip(sequence, places, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"two inputs are called {twice}", remedy="give each a name= of its own")
    return {name: _tensor(name, one) for name, one in zip(names, sequence, strict=True)}, False


def _check_defaults(model: nn.Module, absent: Sequence[str]) -> None:
    """Raises DataError for an input that is None although `forward` has no default for it."""
    parameters = inspect.signature(model.forward).parameters
    for name in absent:
        if name in parameters and parameters[name].default is inspect.Parameter.empty:
            raise DataError(
                f"the input {name} is None, and {type(model).__name__}.forward has no default for it",
                where=app_line(),
                remedy=f"give a tensor for {name}, or write {name}=None in forward",
            )


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise DataError(
            f"the input {name} is of type {type(value).__name__}, and must be a tensor",
            where=app_line(),
            remedy=f"{name} = samba.from_torch_tensor(torch.as_tensor(…), name={name!r}, batch_dim=0)",
        )
    return to_torch(value)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of nn.DataParallel, which does nothing on a device that torch has only one of; a notice tells.
    Any other module as it is."""
    while isinstance(model, nn.DataParallel):
        say_once("nn.DataParallel", "the model inside of it is used; --data-parallel makes replicas", app_line())
        model = model.module
    return model


def check_on_host(name: str, tensor: Tensor) -> None:
    """Raises DataError for the input `name` on a device of torch's: those of a session are on the host."""
    if not tensor.is_cpu:
        raise DataError(
            f"{name} is on the device {tensor.device}, and a session is given tensors of the CPU",
            where=app_line(),
            remedy=f"{name}.cpu(), or leave out what moves it there: session.run sends it to the device itself",
        )


def name_of(tensor: Tensor) -> str | None:
    """The name that the app gave to `tensor`."""
    return tensor.sn_name if isinstance(tensor, SambaTensor) else None


def flat(inputs: Inputs) -> list[Tensor]:
    """The tensors of `inputs`, in order, without those that are None."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, list | tuple):  # asked first: a question about a Mapping costs ten times as much
        return [one for one in inputs if one is not None]
    return [one for one in (inputs.values() if isinstance(inputs, Mapping) else inputs) if one is not None]


def repeatable(inputs: Inputs) -> Inputs:
    """`inputs` as something that can be gone over more than once: apps also give `dict.values()`, and generators."""
    if isinstance(inputs, list | tuple | Tensor | Mapping):
        return inputs
    if not isinstance(inputs, Iterable):
        raise DataError(
            f"inputs are of type {type(inputs).__name__}, and must be tensors",
            where=app_line(),
            remedy="give a list or tuple of tensors, or a dictionary of tensors by name",
        )
    return list(inputs)


def as_mapping(name: str, value: object) -> Mapping[Any, Any]:
    """Names with values, which apps give as a dictionary, or as what `parse_app_args` returned; none for None.

    Raises OptionError, which calls it `name`, for anything else.
    """
    if value is None:
        return {}
    if isinstance(value, Namespace):
        return vars(value)
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{name} is of type {type(value).__name__}, and must be names with values",
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
                f"{type(one).__module__}.{type(one).__name__} cannot be put into a graph",
                remedy="use samba.optim.SGD, samba.optim.Adam or samba.optim.AdamW",
            )
    return listed


def build_fields(config: Mapping[str, object], name: str) -> dict[str, object]:
    """The fields of BuildOptions that an app's arguments give; `name` is what the app calls its PEF."""
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
    """The fields of BuildOptions with which a PEF says that it was compiled."""
    names = set(BuildOptions.model_fields) - {"output_folder", "inference"}
    return {name: value for name, value in compile_options.items() if name in names}


def _indices(given: Sequence[int] | int | None) -> tuple[int, ...]:
    listed = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(one, int) for one in listed):
        raise OptionError(
            f"loss_indices is {given!r}, and must be whole numbers", where=app_line(), remedy="loss_indices=[0]"
        )
    return listed


def _as_computed(tensor: Tensor, parameters: set[torch.dtype]) -> Tensor:
    """An input in the type in which PyTorch computes with it. The device takes labels in int16, where PyTorch wants
    class indices in int64; and inputs in bfloat16 or float32, where PyTorch wants the type of all `parameters`."""
    if tensor.dtype is torch.int16:
        return tensor.long()
    if tensor.dtype in (torch.bfloat16, torch.float32) and len(parameters) == 1:
        wanted = next(iter(parameters))
        if tensor.dtype is torch.float32 and wanted is torch.bfloat16:
            say_once("the type of float32 inputs", "they are rounded to bfloat16, as the parameters are", app_line())
        return tensor.to(wanted)
    return tensor


def _takes_any(model: nn.Module) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _batch_size(inputs: Inputs, named: Mapping[str, Tensor]) -> int:
    """The first extent of all inputs."""
    if not named:
        raise DataError("the model is given no inputs", remedy="pass inputs= a list of SambaTensors")
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
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(
            f"inputs have batches of different sizes: {told}", remedy="give all inputs the same first extent"
        )
    return next(iter(sizes.values()))


def _updates(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterable[Update]:
    """An update for each parameter group of each optimizer."""
    if not optimizers:
        raise OptionError(
            "training needs an optimizer, and none is given",
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
                yield _update(options, names)
    missing = [path for path, p in model.named_parameters() if p.requires_grad and path not in updated]
    if missing:
        raise ModelError(
            f"no optimizer updates {', '.join(missing[:3])}{' …' * (len(missing) > 3)}",
            remedy="give them to an optimizer, or freeze them: parameter.requires_grad_(False)",
        )


def _update(options: OptimizerOptions, names: frozenset[str]) -> Update:
    return Update(options.name, options.hyperparameters(), names)
