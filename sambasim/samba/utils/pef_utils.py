"""The metadata and the content of a PEF."""

import os
from argparse import Namespace
from collections.abc import Mapping

import torch
from pydantic import JsonValue
from torch import nn

from sambasim import __version__
from sambasim.errors import OptionError
from sambasim.pef import locate, peek, read
from sambasim.report.inspect import contents
from sambasim.samba import context
from sambasim.samba.checks.place import app_line
from sambasim.samba.utils.parser import PARSED_BATCH_SIZE, Arguments, by_name


def get_pefmeta(args: Namespace | Mapping[str, object], model: nn.Module) -> dict[str, str]:
    """The metadata of a PEF as text: every argument, the `repr` of the model, and versions.

    args: what `parse_app_args` returned, or its `vars`

    `parsed_batch_size` is -b of the command line, the default of -b of a run. Raises OptionError for other `args`.
    """
    arguments = {name: str(value) for name, value in sorted(by_name(args, "get_pefmeta").items())}
    facts = {"model_repr": repr(model), "sambasim_version": __version__, "torch_version": str(torch.__version__)}
    parsed = context.current().arguments
    if isinstance(parsed, Arguments) and parsed.parsed_batch_size is not None:
        facts[PARSED_BATCH_SIZE] = str(parsed.parsed_batch_size)
    return {**arguments, **facts}


def get_pefmeta_dict(
    pef: Mapping[str, object] | str | os.PathLike[str], model: nn.Module | None = None
) -> dict[str, str]:
    """`get_pefmeta` for a dictionary of arguments and a model; for a PEF, the metadata in it.

    pef: the dictionary; or the path of a PEF, or its name, found as out/NAME/NAME.pef

    Raises OptionError if there is no such PEF or no model beside the dictionary, PefError if the PEF is damaged.
    """
    if isinstance(pef, Mapping):
        if model is None:
            raise OptionError(
                "get_pefmeta_dict needs a model beside arguments",
                where=app_line(),
                remedy="get_pefmeta_dict(vars(args), model)",
            )
        return get_pefmeta(pef, model)
    return dict(read(locate(os.fspath(pef))).metadata)


def get_pef_info(pef: str | os.PathLike[str]) -> dict[str, JsonValue]:
    """The content of a PEF as JSON data, as `sambasim inspect --json` prints it.

    It has `name`, `batch_size`, `world_size`, `graphs` with their inputs, outputs and sections, and `symbols`.
    Raises OptionError if there is no such PEF, PefError if it is damaged.
    """
    path = locate(os.fspath(pef))
    information: dict[str, JsonValue] = contents(path, peek(path), read(path)).model_dump(mode="json")
    return information
