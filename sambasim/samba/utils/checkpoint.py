"""Checkpoints: the `state_dict` of the model and its optimizers, and what the app adds, in a file for `torch.load`.

`load_sharded_checkpoint` also reads weights in Hugging Face's layout.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sambasim.errors import OptionError, WeightsError
from sambasim.files import once, replacing
from sambasim.runtime.values.memory import read_saved, write_tensors
from sambasim.samba.checks.options import ON_DEVICE
from sambasim.samba.process import app_error
from sambasim.samba.request import Optimizer, as_sequence
from sambasim.samba.session import session
from sambasim.samba.tensor import host_values
from sambasim.samba.utils.common import is_main_process


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    **others: object,
) -> None:
    """Copies weights and optimizer state from the device, and rank 0 writes them with `others`, as `epoch=3`: numbers,
    texts, tensors, and lists and dictionaries of these. Options of the optimizers are those of the app; beside them is
    what `hyperparam_dict` has set, unless the app has changed its own. The file is replaced atomically."""
    session.to_cpu(model)
    if not is_main_process():
        return
    states, target, now = [one.state_dict() for one in as_sequence(optimizers)], Path(path), session.loaded(model)
    for state in states[:1]:
        state["param_groups"][0][ON_DEVICE] = now.checks.host.options.for_checkpoint(now.hyperparameters.given)
    try:
        with replacing(target) as hidden:
            torch.save({**others, "model": model.state_dict(), "optimizers": states}, hidden)
    except (OSError, RuntimeError) as error:  # torch has a RuntimeError for a full disk
        raise OptionError(f"the checkpoint cannot be written to {target}", where=str(error)) from error


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> dict[str, object]:
    """Loads a checkpoint into `model` and its optimizers on the host; returns the `others` of `save_checkpoint`. Call
    it before `trace_graph` or `session.to_device`, which copy the state to the device."""
    target, listed = Path(path), as_sequence(optimizers)
    try:
        held = torch.load(target)
    except Exception as error:  # torch has no class of its own for what a damaged file brings about
        raise WeightsError(f"{target} cannot be read as a checkpoint", where=str(error).partition("\n")[0]) from error
    if not isinstance(held, dict) or not {"model", "optimizers"} <= held.keys():
        raise WeightsError(f"{target} was not written by save_checkpoint", remedy="torch.load, and load_state_dict")
    if len(held["optimizers"]) != len(listed):
        what = f"{target} has the state of {len(held['optimizers'])} optimizers, and {len(listed)} are given"
        raise WeightsError(what, remedy="give load_checkpoint those of save_checkpoint, in their order")
    try:
        model.load_state_dict(held["model"])
        for one, state in zip(listed, held["optimizers"], strict=True):
            one.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        what = f"{target} is of another model: {' '.join(str(error).split())}"
        raise WeightsError(what, remedy="load a checkpoint of the model that is given") from error
    return {name: value for name, value in held.items() if name not in ("model", "optimizers")}


def load_sharded_checkpoint(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, ignore_dtype_mismatch: bool = False
) -> None:
    """Loads the weights of a .safetensors, .bin or .pt file, or of a folder of them, into `model` on the host.

    path: of a folder, the files that *.index.json names are read; without one, all of one suffix, .safetensors first
    strict: whether files and model must have the same tensors; a tensor tied to a loaded one may be missing
    ignore_dtype_mismatch: convert tensors of another dtype than the model's

    Raises WeightsError for files that cannot be read or do not fit the model, and for another dtype."""
    targets = model.state_dict()
    loaded: set[int] = set()  # addresses
    for file in _shards(Path(path)):
        for name, value in _read_shard(file).items():
            target = targets.get(name)
            if target is None and strict:
                raise _misfit(file, f"has {name}, which the model does not have", "strict=False leaves it out")
            if target is None:
                continue
            if value.shape != target.shape:
                shapes = f"{tuple(value.shape)}, and in the model {tuple(target.shape)}"
                raise _misfit(file, f"has {name} in the shape {shapes}", "load the weights of this model")
            if value.dtype is not target.dtype and not ignore_dtype_mismatch:
                dtypes = f"{value.dtype}, and in the model it is {target.dtype}"
                raise _misfit(file, f"has {name} in {dtypes}", "ignore_dtype_mismatch=True converts it")
            loaded.add(target.copy_(value).data_ptr())
    missing = [name for name, value in targets.items() if value.data_ptr() not in loaded]
    if strict and missing:
        raise _misfit(Path(path), f"has no {missing[0]}", "strict=False keeps what the model has")


def save_tensors(
    tensors: Iterable[Tensor] | Mapping[str, Tensor], path: str | os.PathLike[str] | None = None
) -> dict[str, Tensor]:
    """The values of `tensors` by name as plain tensors, from the device if the loaded PEF has them. Rank 0 writes them
    to `path`, a .safetensors file. Raises OptionError for a tensor without a name, or if it cannot be written."""
    named: Mapping[Any, Tensor]
    named = tensors if isinstance(tensors, Mapping) else {getattr(one, "sn_name", None): one for one in tensors}
    if None in named:
        remedy = "give it SambaTensors and parameters of the model that was traced, or {name: tensor}"
        raise app_error(OptionError, "save_tensors needs names, and a tensor has none", remedy)
    values: dict[str, Tensor] = {}
    for name, tensor in named.items():
        with suppress(OptionError):  # no PEF is loaded, or it has no tensor of that name
            (tensor,) = session.get_tensors_by_name([name])
        values[name] = host_values(tensor, name).clone().contiguous()
    if path is not None and is_main_process():
        write_tensors(Path(path), values, "the tensors", "utils.checkpoint.save_tensors(tensors, path)")
    return values


def _shards(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = next(iter(sorted(path.glob("*.index.json"))), None)
    if index is not None:
        try:
            weight_map = json.loads(index.read_text(), object_pairs_hook=once)["weight_map"]
            return [path / name for name in sorted(set(weight_map.values()))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise _misfit(index, "is no index of weights", "copy the checkpoint again") from error
    for suffix in (".safetensors", ".bin", ".pt"):
        if files := sorted(path.glob(f"*{suffix}")):
            return files
    raise _misfit(path, "is no file, and no folder with files of .safetensors, .bin, .pt", "check the path")


def _read_shard(file: Path) -> Mapping[str, Tensor]:
    held = read_saved(file, "copy the checkpoint again")
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise _misfit(file, "holds more than tensors by name", "save model.state_dict() alone")
    return held


def _misfit(path: Path, what: str, remedy: str) -> WeightsError:
    return app_error(WeightsError, f"{path} {what}", remedy)
