"""Errors of torch that mean that the app was written for another machine, translated to errors of sambasim.

They are recognised by type and text once they have escaped from the script: the app may catch them first.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sambasim.errors import LaunchError, MachineError, SambasimError
from sambasim.samba.checks.place import line_of

_LIBRARY_STARTS_IT = "leave init_process_group out of the app: with --data-parallel, parse_app_args calls it"
_ON_THE_HOST = 'device = "cpu", and no .cuda(): samba.session.run sends its inputs to the device itself'
_ON_THE_CPU = 'torch.load(…, map_location="cpu")'
_NO_ACCELERATOR = "the app asks for a device by number, or for pinned memory, and torch has no accelerator here"
_NO_CUDA = "the app asks for the device cuda, and torch has none here"


@dataclass(frozen=True, slots=True)
class _Row:
    """An error of type `kind` whose text contains `words` becomes a `translation` with `what` and `remedy`."""

    kind: type[Exception]
    words: str
    translation: Callable[..., SambasimError]
    what: str
    remedy: str


_TABLE = (
    _Row(
        ValueError,
        "initialize the default process group twice",
        LaunchError,
        "the app calls init_process_group, and torch.distributed is initialised already",
        _LIBRARY_STARTS_IT,
    ),
    _Row(
        ValueError,
        "Error initializing torch.distributed using env:// rendezvous",
        LaunchError,
        "the app calls init_process_group, which needs the environment of torchrun, and torchrun did not start this",
        _LIBRARY_STARTS_IT,
    ),
    _Row(
        RuntimeError,
        "Distributed package doesn't have MPI built in",
        LaunchError,
        "the app calls init_process_group for MPI, and this torch is built without MPI",
        _LIBRARY_STARTS_IT,
    ),
    _Row(
        ValueError,
        "Default process group has not been initialized",
        LaunchError,
        "the app calls torch.distributed, which is not initialised: --data-parallel is missing, or this is no run",
        "add --data-parallel; or use samba.utils.get_rank() and get_world_size(), which are 0 and 1 without it",
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
    """The translation of an error that has escaped from a script, with its traceback and the app's line; or the error
    itself, if the table does not have it."""
    for row in _TABLE:
        if isinstance(error, row.kind) and row.words in str(error):
            own = row.translation(row.what, where=line_of(error.__traceback__), remedy=row.remedy)
            return own.with_traceback(error.__traceback__)
    return error
