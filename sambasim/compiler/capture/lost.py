"""What a trace would lose without a word is refused here, at its line. Activation checkpointing, which changes no
result, calls its block; `.data` is `.detach()`, and to assign to it is to copy. What a call does outside of Python is
told: a PEF has what a file gave for the example batch, and does nothing of it."""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.fx import traceback
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy

from sambasim.compiler.capture import explain
from sambasim.compiler.capture.explain import Obstacle, Occurrence, all_occurrences
from sambasim.compiler.capture.recording import frames, running_line
from sambasim.compiler.capture.trial import replaced
from sambasim.whose_code import is_library_file, is_users_file

_SAVED = Obstacle("hooks on the tensors that are saved for the backward, which a graph does not call", "leave them out")
_NO_ZEROS = Obstacle(
    "set_materialize_grads(False), where a graph has zeros", "leave it out: an unused output has a gradient of zeros"
)
_CHECKPOINTED = Obstacle(
    "activation checkpointing that changes results: use_reentrant=True of inputs without a gradient, or "
    "preserve_rng_state=False",
    "use_reentrant=False, and leave out preserve_rng_state",
)
_VERSION = Obstacle("_version, which counts the changes of a tensor, and stays as it is in a graph", explain.COUNTED)
_GRAD = Obstacle(
    ".grad, which a graph does not have",
    "write what forward() does where it is None, as zero_grad() leaves it before each step",
)
_DATA = Obstacle(
    "a change of .data that the backward of an earlier operator reads",
    "change a copy: v = v.clone(), before v.data.copy_(…) or v.data[…] = …",
)
_INFERENCE_MODE = Obstacle("torch.inference_mode(), through which a graph would send gradients", "torch.no_grad()")


@contextlib.contextmanager
def nothing_lost(*, training: bool) -> Iterator[None]:
    """While this is open, what a trace would lose raises CaptureError, and blocks under torch.utils.checkpoint are
    called as they are. What they trace has the mark `recompute`."""
    count_of, data = vars(torch._C.TensorBase)["_version"].__get__, vars(torch._C.TensorBase)["data"]
    grad = vars(torch._C.TensorBase)["grad"]
    lines: list[str] = []  # that read `.data`

    def refusing(
        own: Callable[..., Any], obstacle: Obstacle, is_lost: Callable[..., bool] = lambda *given: True
    ) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            if is_lost(*given) and _is_users(sys._getframe(1)):
                raise _refused(obstacle)
            return own(*given)

        return called

    def data_of(tensor: Tensor) -> Tensor:
        if not _is_users(sys._getframe(1)):
            own: Tensor = data.__get__(tensor)
            return own
        lines.append(str(running_line()))
        return tensor.detach()

    def set_data(tensor: Tensor, value: Tensor) -> None:
        if _is_users(sys._getframe(1)):
            with torch.no_grad():
                tensor.copy_(value)
        else:
            data.__set__(tensor, value)

    def reentrant(function: Callable[..., object], preserves: bool, *args: Any) -> object:
        if training and not (preserves and any(isinstance(one, Tensor) and one.requires_grad for one in args)):
            raise _refused(_CHECKPOINTED)
        with _marked():
            return function(*args)

    def not_reentrant(function: Callable[..., object], preserves: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not preserves:
            raise _refused(_CHECKPOINTED)
        with _marked():
            yield

    block, hooks, zeros = torch.inference_mode, saved_tensors_hooks, "set_materialize_grads"
    with contextlib.ExitStack() as stack:
        for owner, name, substitute in (
            (Tensor, "_version", property(refusing(count_of, _VERSION))),
            (Tensor, "grad", property(refusing(grad.__get__, _GRAD), grad.__set__, grad.__delete__)),
            (Tensor, "data", property(data_of, set_data)),
            (block, "__enter__", refusing(block.__enter__, _INFERENCE_MODE)),
            (hooks, "__enter__", refusing(hooks.__enter__, _SAVED, lambda one: not isinstance(one, save_on_cpu))),
            (FunctionCtx, zeros, refusing(getattr(FunctionCtx, zeros), _NO_ZEROS, lambda context, value: not value)),
            (CheckpointFunction, "apply", staticmethod(reentrant)),
            (checkpoint, "_checkpoint_without_reentrant_generator", not_reentrant),
            (record_function, "__enter__", lambda block: block),  # a name for the profiler
            (record_function, "__exit__", lambda block, *of_error: None),
        ):
            stack.enter_context(replaced(owner, name, substitute))
        try:
            yield
        except RuntimeError as error:
            if lines and "modified by an inplace operation" in str(error):
                raise all_occurrences([Occurrence(_DATA, line) for line in dict.fromkeys(lines)], training) from error
            raise


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    traceback.current_meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    try:
        yield
    finally:
        traceback.current_meta.pop("recompute", None)


_DECORATORS = torch.utils._contextlib.__file__


def _is_users(frame: FrameType | None) -> bool:
    """Whether the user's code has called it, by `with` or by a decorator; torch calls some itself."""
    while frame is not None and frame.f_code.co_filename == _DECORATORS:
        frame = frame.f_back
    return frame is not None and not is_library_file(frame.f_code.co_filename)


def _refused(obstacle: Obstacle) -> Exception:
    line = running_line()
    return all_occurrences([Occurrence(obstacle, str(line or ""), line.inside if line else "")], training=True)


Told: TypeAlias = dict[str, dict[str, None]]
"""By what is told of it: what the user's code opens and does, with its lines."""

_CODE = (".py", ".pyc", ".so")
_ACTS = {
    *("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.kill"),
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
    *("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg"),
}
"""Audit events of Python. Who writes to a file has opened it."""

_told: Told | None = None
_adding = threading.local()  # what finds a line opens its file


@contextlib.contextmanager
def watched(told: Told) -> Iterator[None]:
    """While this is open, what the user's code opens and does is added to `told`, and what it prints is dropped."""
    global _told
    _listen()
    before, _told = _told, told
    logs = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        with (
            contextlib.redirect_stdout(_Printed()),
            contextlib.redirect_stderr(_Printed()),
            replaced(logging.Logger, "callHandlers", lambda _, one: _hear_text("a log message", one.pathname)),
            warnings.catch_warnings(),
            replaced(warnings, "showwarning", lambda message, kind, file, *more: _hear_text("a warning", file)),
        ):
            warnings.simplefilter("always")
            yield
    finally:
        _told = before
        logging.disable(logs)


@cache  # Python has no way to take it back
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event in _ACTS:
        _tell(explain.DONE, event)
    elif event == "open" and not isinstance(arguments[0], int) and not str(arguments[0]).endswith(_CODE):
        _tell(explain.OPENED, str(arguments[0]))


def _hear_text(what: str, file: str) -> None:
    if is_users_file(file):
        _tell(explain.DONE, what)


def _tell(template: str, what: str) -> None:
    told = _told
    if told is None or getattr(_adding, "is_on", False):
        return
    _adding.is_on = True
    try:
        files = takewhile(is_library_file, (frame.f_code.co_filename for frame in frames()))
        line = None if any(file.startswith("<frozen importlib") for file in files) else running_line()
        if line is not None:
            told.setdefault(template, {})[f"{what}, at {line}"] = None
    finally:
        _adding.is_on = False


class _Printed(io.StringIO):
    def write(self, text: str, /) -> int:
        _tell(explain.DONE, "output")
        return len(text)
