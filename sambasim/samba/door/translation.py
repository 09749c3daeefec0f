"""Errors of torch's that say that an app was written for another machine, as errors of ours.

Torch tells them as if torch itself were at fault. They are known by their words when they have escaped the script, for
the app may have got the function that raises them by any name, and is free to catch them and go on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sambasim.errors import LaunchError, MachineError, SambasimError
from sambasim.samba.checks.place import line_of

_LIBRARY_STARTS_IT = "leave init_process_group out of the app: parse_app_args calls it when --data-parallel is given"
_ON_THE_HOST = 'device = "cpu", and no .cuda(): what samba.session.run is given, it sends to the device itself'
_NO_CUDA = "the app asks for the device cuda, and there is none that torch could use"


@dataclass(frozen=True, slots=True)
class _Row:
    """What an error of the type `kind` whose text has `words` in it is told as."""

    kind: type[Exception]
    words: str
    told_as: Callable[..., SambasimError]
    what: str
    remedy: str


_TABLE = (
    _Row(
        ValueError,
        "initialize the default process group twice",
        LaunchError,
        "the app calls init_process_group, and torch.distributed is up already",
        _LIBRARY_STARTS_IT,
    ),
    _Row(
        ValueError,
        "Error initializing torch.distributed using env:// rendezvous",
        LaunchError,
        "the app calls init_process_group, which looks for what torchrun sets, and torchrun has not started this",
        _LIBRARY_STARTS_IT,
    ),
    _Row(AssertionError, "Torch not compiled with CUDA enabled", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(RuntimeError, "Found no NVIDIA driver on your system", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(RuntimeError, "No CUDA GPUs are available", MachineError, _NO_CUDA, _ON_THE_HOST),
)


def translated(error: BaseException) -> BaseException:
    """What `error`, which has escaped a script, is told as: itself, unless it is one of the table. The traceback stays,
    and the line is the app's."""
    for row in _TABLE:
        if isinstance(error, row.kind) and row.words in str(error):
            told = row.told_as(row.what, where=line_of(error.__traceback__), remedy=row.remedy)
            return told.with_traceback(error.__traceback__)
    return error
