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
_ON_THE_CPU = 'torch.load(…, map_location="cpu")'
_NO_ACCELERATOR = "the app asks for a device by its number, or for pinned memory, and torch has no accelerator here"
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
    _Row(
        RuntimeError,
        "Distributed package doesn't have MPI built in",
        LaunchError,
        "the app calls init_process_group, and this torch has no MPI of its own",
        _LIBRARY_STARTS_IT,
    ),
    _Row(
        ValueError,
        "Default process group has not been initialized",
        LaunchError,
        "the app calls torch.distributed, which is not up: --data-parallel was not typed, or the command is no run",
        "--data-parallel; or samba.utils.get_rank() and get_world_size(), which are 0 and 1 without it",
    ),
    _Row(AssertionError, "Torch not compiled with CUDA enabled", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(TypeError, "Torch not compiled with CUDA enabled", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(AttributeError, "module 'torch._C' has no attribute '_cuda_", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(RuntimeError, "torch.cuda.Stream requires CUDA support", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(RuntimeError, "Found no NVIDIA driver on your system", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(RuntimeError, "No CUDA GPUs are available", MachineError, _NO_CUDA, _ON_THE_HOST),
    _Row(RuntimeError, "Attempting to deserialize object on a CUDA device", MachineError, _NO_CUDA, _ON_THE_CPU),
    _Row(
        RuntimeError,
        "don't know how to restore data location",
        MachineError,
        "the app loads tensors to a device that torch does not know",
        _ON_THE_CPU,
    ),
    _Row(RuntimeError, "Cannot access accelerator device when none is", MachineError, _NO_ACCELERATOR, _ON_THE_HOST),
    _Row(
        RuntimeError,
        "pin_memory=True requires a CUDA or other accelerator",
        MachineError,
        _NO_ACCELERATOR,
        "leave pin_memory out",
    ),
    _Row(
        RuntimeError,
        "device type at start of device string",
        MachineError,
        "the app asks for a device that torch does not know",
        _ON_THE_HOST,
    ),
    _Row(
        RuntimeError,
        "PyTorch is not linked with support for",
        MachineError,
        "the app asks for a device that this torch is built without",
        _ON_THE_HOST,
    ),
)


def translated(error: BaseException) -> BaseException:
    """What `error`, which has escaped a script, is told as: itself, unless it is one of the table. The traceback stays,
    and the line is the app's."""
    for row in _TABLE:
        if isinstance(error, row.kind) and row.words in str(error):
            told = row.told_as(row.what, where=line_of(error.__traceback__), remedy=row.remedy)
            return told.with_traceback(error.__traceback__)
    return error
