"""Checkpoints as apps write them: the `state_dict` of the model and of its optimizers, and what the app adds.

The files are torch's, and have no code in them: `torch.load` reads them as it does any other.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from sambasim.errors import OptionError, WeightsError
from sambasim.samba.request import Optimizer, as_sequence
from sambasim.samba.session import session
from sambasim.samba.utils.ranks import is_main_process

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    **others: object,
) -> None:
    """Bring weights and optimizer state from the device, and write them; rank 0 alone writes. All ranks may call it.

    others: kept under their names, as `epoch=3`: numbers, texts, tensors, and lists and dictionaries of these

    The file appears whole or not at all. Raises OptionError if no PEF is loaded for `model`, or it cannot be written.
    """
    session.to_cpu(model)
    if not is_main_process():
        return
    states = [one.state_dict() for one in as_sequence(optimizers)]
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        torch.save({**others, "model": model.state_dict(), "optimizers": states}, temporary)
        os.replace(temporary, target)
    except (OSError, RuntimeError) as error:  # torch has a RuntimeError for a folder that is not there
        raise OptionError(f"the checkpoint cannot be written to {target}", where=str(error)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> dict[str, object]:
    """Give `model` and its optimizers, on the host, the state of a checkpoint; returns what was saved beside it.

    Before `trace_graph`, which sends it to the device; or before `session.to_device`. Raises WeightsError if the file
    is not there, is no checkpoint, or is of another model or of other optimizers.
    """
    target, listed = Path(path), as_sequence(optimizers)
    try:
        held = torch.load(target)
    except Exception as error:  # torch has no class of its own for what a damaged file brings about
        raise WeightsError(f"{target} cannot be read as a checkpoint", where=str(error).partition("\n")[0]) from error
    if not isinstance(held, dict) or not {"model", "optimizers"} <= held.keys():
        raise WeightsError(f"{target} was not written by save_checkpoint", remedy="torch.load, and load_state_dict")
    if len(held["optimizers"]) != len(listed):
        raise WeightsError(
            f"{target} has the state of {len(held['optimizers'])} optimizers, and {len(listed)} are given",
            remedy="give load_checkpoint the optimizers that save_checkpoint was given, in that order",
        )
    try:
        model.load_state_dict(held["model"])
        for one, state in zip(listed, held["optimizers"], strict=True):
            one.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise WeightsError(
            f"{target} is of another model: {why}", remedy="load a checkpoint of the model that is given"
        ) from error
    return {name: value for name, value in held.items() if name not in ("model", "optimizers")}
