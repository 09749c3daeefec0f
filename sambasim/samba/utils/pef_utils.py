"""What a PEF remembers of the command line and the model that it was compiled from."""

import os
from argparse import Namespace

import torch
from pydantic import JsonValue
from torch import nn

from sambasim import __version__
from sambasim.pef import locate, peek, read
from sambasim.report.contents import contents


def get_pefmeta(args: Namespace, model: nn.Module) -> dict[str, str]:
    """The metadata of a PEF: every argument of library and app as text, the model as it prints, and the versions.

    args: what `parse_app_args` returned
    model: what is compiled
    """
    arguments = {name: str(value) for name, value in sorted(vars(args).items())}
    facts = {"model_repr": repr(model), "sambasim_version": __version__, "torch_version": str(torch.__version__)}
    return {**arguments, **facts}


def get_pefmeta_dict(pef: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata that a PEF carries. `pef` is a path, or a name, found as out/NAME/NAME.pef.

    Raises OptionError if there is no such PEF, PefError if it is damaged.
    """
    return dict(read(locate(os.fspath(pef))).metadata)


def get_pef_info(pef: str | os.PathLike[str]) -> dict[str, JsonValue]:
    """What is in a PEF, as plain data that JSON can hold: what `sambasim inspect --json` prints.

    Among it are `name`, `batch_size`, `world_size`, `graphs` with their inputs, outputs and sections, and `symbols`.
    Raises OptionError if there is no such PEF, PefError if it is damaged.
    """
    path = locate(os.fspath(pef))
    information: dict[str, JsonValue] = contents(path, peek(path), read(path)).model_dump(mode="json")
    return information
