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
from sambasim.samba import process
from sambasim.samba.findings import app_error
from sambasim.samba.request import as_mapping
from sambasim.samba.utils.parser import PARSED_BATCH_SIZE, Arguments

__all__ = ["get_pef_info", "get_pefmeta", "get_pefmeta_dict"]


def get_pefmeta(args: Namespace | Mapping[str, object], model: nn.Module) -> dict[str, str]:
    """The metadata of a PEF as text: every argument of the app, the `repr` of the model, versions, and the -b of the
    command line, which is the default of -b of a run."""
    arguments = {name: str(value) for name, value in sorted(as_mapping("args", args).items())}
    facts = {"model_repr": repr(model), "sambasim_version": __version__, "torch_version": str(torch.__version__)}
    parsed = process.current().arguments
    if isinstance(parsed, Arguments) and parsed.parsed_batch_size is not None:
        facts[PARSED_BATCH_SIZE] = str(parsed.parsed_batch_size)
    return {**arguments, **facts}


def get_pefmeta_dict(
    pef: Mapping[str, object] | str | os.PathLike[str], model: nn.Module | None = None
) -> dict[str, str]:
    """`get_pefmeta` for a dictionary of arguments and a model; for the path or the name of a PEF, the metadata in it.

    Raises OptionError if there is no such PEF or no model beside the dictionary, PefError if the PEF is damaged.
    """
    if isinstance(pef, Mapping):
        if model is None:
            what = "get_pefmeta_dict needs a model beside arguments"
            raise app_error(OptionError, what, "get_pefmeta_dict(vars(args), model)")
        return get_pefmeta(pef, model)
    return dict(read(locate(os.fspath(pef))).metadata)


def get_pef_info(pef: str | os.PathLike[str]) -> dict[str, JsonValue]:
    """The content of a PEF, as `sambasim inspect --json` prints it. Raises OptionError if there is no such PEF,
    PefError if it is damaged."""
    path = locate(os.fspath(pef))
    from sambasim.report.inspect import contents  # the tables of the terminal take long to import

    information: dict[str, JsonValue] = contents(path, peek(path), read(path)).model_dump(mode="json")
    return information
