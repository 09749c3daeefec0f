"""Functions of `samba.utils` that need no PEF: ranks, seeds, the folder of an app, and weight normalization."""

import os
from numbers import Integral
from pathlib import Path

from torch import nn
from torch.nn.utils import parametrizations

from sambasim.errors import ModelError, OptionError, UserError
from sambasim.runtime.determinism import seed_everything
from sambasim.samba.checks.place import app_line
from sambasim.samba.context import current

_SEED_VARIABLE = "SAMBA_SEED"


def get_rank() -> int:
    """The rank of this process; 0 before the ranks are connected, and in a single process."""
    communicator = current().communicator
    return 0 if communicator is None else communicator.rank


def get_world_size() -> int:
    """The number of ranks; 1 before they are connected, and in a single process."""
    communicator = current().communicator
    return 1 if communicator is None else communicator.world_size


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes shared files."""
    return get_rank() == 0


def set_seed(seed: int) -> None:
    """Seeds torch, numpy and random on this rank. The same seed on all ranks makes the same weights.

    Raises UserError unless `seed` is a whole number of at least 0.
    """
    if not isinstance(seed, Integral) or seed < 0:
        raise UserError(
            f"a seed is a whole number of at least 0, not {seed!r}", where=app_line(), remedy="utils.set_seed(1)"
        )
    seed_everything(int(seed))


def seed_from_environment() -> None:
    """`set_seed` with the environment variable SAMBA_SEED, if it is set. Raises OptionError for a bad value."""
    text = os.environ.get(_SEED_VARIABLE)
    if not text:
        return
    if not text.isdecimal():
        raise OptionError(
            f"{_SEED_VARIABLE} is {text!r} in the environment, and a seed is a whole number of at least 0",
            remedy=f"export {_SEED_VARIABLE}=256, or unset {_SEED_VARIABLE}",
        )
    set_seed(int(text))


def get_file_dir(file: str | os.PathLike[str]) -> str:
    """The absolute path of the folder that `file` is in: `get_file_dir(__file__)`."""
    return str(Path(file).resolve().parent)


def weight_norm_(module: nn.Module) -> nn.Module:
    """Replaces each weight in `module`, in place, by a trained magnitude for each output and a trained direction.

    A weight is a parameter `weight` of two dimensions or more: of Linear, of a convolution, of an embedding. The
    results of the model stay the same. Call it before the optimizer is made: the parameters are new. Returns `module`.
    Source: Salimans & Kingma, Weight Normalization, NeurIPS 2016, arXiv:1602.07868.

    Raises ModelError if `module` is no module or has no weight, or if two modules in it share one.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"weight_norm_ takes a torch.nn.Module, not {type(module).__name__}",
            where=app_line(),
            remedy="weight_norm_(model.layer)",
        )
    found = [(path, inner, inner._parameters.get("weight")) for path, inner in module.named_modules()]
    weights = [(path, inner, weight) for path, inner, weight in found if weight is not None and weight.dim() > 1]
    if not weights:
        raise ModelError(
            f"{type(module).__name__} has no weight to normalize",
            where=app_line(),
            remedy="give weight_norm_ a module with Linear or convolution layers, once",
        )
    owners: dict[int, str] = {}
    for path, _, weight in weights:
        other = owners.setdefault(id(weight), path)
        if other != path:
            raise ModelError(
                f"{other} and {path} share one weight, and normalized they would have two",
                where=app_line(),
                remedy="call weight_norm_ on the parts of the model that share nothing",
            )
    for _, inner, _ in weights:
        parametrizations.weight_norm(inner)
    return module
