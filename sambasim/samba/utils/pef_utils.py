"""What a PEF remembers of the command line and the model that it was compiled from."""

import os
from argparse import Namespace
from collections.abc import Mapping

import torch
from pydantic import JsonValue
from torch import nn

from sambasim import __version__
from sambasim.errors import OptionError
from sambasim.pef import locate, peek, read
from sambasim.report.contents import contents
from sambasim.samba.checks.place import app_line


def get_pefmeta(args: Namespace | Mapping[str, object], model: nn.Module) -> dict[str, str]:
    """The metadata of a PEF: every argument of library and app as text, the model as it prints, and the versions.

    args: what `parse_app_args` returned, or its `vars`
    model: what is compiled
    """
    given = vars(args) if isinstance(args, Namespace) else args
    arguments = {name: str(value) for name, value in sorted(given.items())}
    facts = {"model_repr": repr(model), "sambasim_version": __version__, "torch_version": str(torch.__version__)}
    return {**arguments, **facts}


def get_pefmeta_dict(
    pef: Mapping[str, object] | str | os.PathLike[str], model: nn.Module | None = None
) -> dict[str, str]:
    """What `get_pefmeta` gives for a dictionary of arguments and a model; or, for a PEF alone, the metadata in it.

    pef: the dictionary; or the path of a PEF, or its name, found as out/NAME/NAME.pef

    Raises OptionError if there is no such PEF or no model beside the dictionary, PefError if the PEF is damaged.
    """
    if isinstance(pef, Mapping):
        if model is None:
            raise OptionError(
                "get_pefmeta_dict was given arguments and no model",
                where=app_line(),
                remedy="get_pefmeta_dict(vars(args), model)",
            )
        return get_pefmeta(pef, model)
    return dict(read(locate(os.fspath(pef))).metadata)


def get_pef_info(pef: str | os.PathLike[str]) -> dict[str, JsonValue]:
    """What is in a PEF, as plain data that JSON can hold: what `sambasim inspect --json` prints.

    Among it are `name`, `batch_size`, `world_size`, `graphs` with their inputs, outputs and sections, and `symbols`.
    Raises OptionError if there is no such PEF, PefError if it is damaged.
    """
    path = locate(os.fspath(pef))
    information: dict[str, JsonValue] = contents(path, peek(path), read(path)).model_dump(mode="json")
    return information
