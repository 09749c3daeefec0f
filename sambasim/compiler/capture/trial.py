"""Context managers around a capture or a call. Each restores all that it changes.

What a trace would lose without a word is refused, at its line. Activation checkpointing, which changes no result, calls
its block; `.data` is `.detach()`, and to assign to it is to copy. What a call does outside of Python is told: a PEF has
what a file gave for the example batch, and does nothing of it itself."""

import contextlib
import copy
import io
import logging
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import takewhile
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.fx import traceback
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy

from sambasim.compiler.capture import explain
from sambasim.compiler.capture.explain import Obstacle, Occurrence, all_occurrences
from sambasim.compiler.capture.recording import frames, running_line
from sambasim.data.user_code import generators_kept
from sambasim.whose_code import is_library_file, is_users_file


@contextlib.contextmanager
def logs_disabled(level: int) -> Iterator[None]:
    """Up to `level`."""
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(level)
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Output, logs and warnings are dropped."""
    out, errors = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with logs_disabled(logging.CRITICAL), warnings.catch_warnings(action="ignore"), out, errors:
        yield


@contextlib.contextmanager
def with_values(changes: Iterable[tuple[Any, str, object]]) -> Iterator[None]:
    """Attributes, by owner and name, have other values."""
    before = []
    try:
        for owner, name, value in changes:
            is_class, is_tensor = isinstance(owner, type), isinstance(owner, Tensor)
            is_new = name not in vars(owner) if is_class else is_tensor and not hasattr(owner, name)
            original = vars(owner).get(name) if is_class or is_new else getattr(owner, name)
            setattr(owner, name, value)
            before.append((owner, name, original, is_new))
        yield
    finally:
        for owner, name, original, is_new in reversed(before):
            delattr(owner, name) if is_new else setattr(owner, name, original)


def modes_kept(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Afterwards each module of `model` is in training or in evaluation mode, as it was."""
    return with_values([(module, "training", module.training) for module in model.modules()])


class Attributes:
    """What the modules of `step` have beside parameters and buffers."""

    def __init__(self, step: nn.Module) -> None:
        self._kept = [(module, _own(module)) for module in step.modules()]

    def restore(self, copied: Callable[[Any], Any] = lambda value: value) -> None:
        """The modules have it again."""
        for module, attributes in self._kept:
            for key in _own(module).keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update((key, copied(value)) for key, value in attributes.items())

    def begin(self) -> None:
        """The modules have it again, with copies of its containers, which a call may change."""
        self.restore(lambda value: copy.copy(value) if type(value) in (dict, OrderedDict, list, set) else value)


_OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"}


def _own(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OF_ALL_MODULES}


@contextlib.contextmanager
def trial(step: nn.Module) -> Iterator[Attributes]:
    """Drops output, logs and warnings; afterwards tensors, attributes and random generators are as before."""
    attributes = Attributes(step)
    places: list[dict[str, Any]] = [held for module in step.modules() for held in (module._parameters, module._buffers)]
    tensors = [(held, dict(held)) for held in places]
    try:
        attributes.begin()
        with quiet(), as_written(), generators_kept():
            yield attributes
    finally:
        attributes.restore()
        for held, own in tensors:  # a module may have a __setattr__ of its own
            held.clear()
            held.update(own)


def tied_once(step: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Of tensors that modules share, only the first is one; the others read it. A tracer would give each an input."""
    first: dict[int, tuple[nn.Module, str]] = {}
    changes: list[tuple[Any, str, object]] = []
    for module in step.modules():
        own_class, shared = type(module), dict[str, object]()
        for kind in ("_parameters", "_buffers"):
            held = getattr(module, kind)
            tensors = [(name, tensor) for name, tensor in held.items() if tensor is not None]
            places = {name: first.setdefault(id(tensor), (module, name)) for name, tensor in tensors}
            if again := {name: place for name, place in places.items() if place != (module, name)}:
                changes.append((module, kind, {name: tensor for name, tensor in held.items() if name not in again}))
                shared |= {name: property(partial(_read_from, *place)) for name, place in again.items()}
        if shared:
            names = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
            changes.append((module, "__class__", type(own_class.__name__, (own_class,), shared | names)))
    return with_values(changes)


def _read_from(owner: nn.Module, key: str, reader: nn.Module) -> object:
    return getattr(owner, key)


def as_written() -> contextlib.AbstractContextManager[None]:
    """torch.compile has no effect: a compiled function can be neither traced nor recorded. Where torch's compiler is
    not imported, which would take seconds, nothing is compiled yet."""
    is_imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_imported else contextlib.nullcontext()


PLAIN = "_sambasim_plain"  # the attribute of a buffer that is a plain attribute of its module


@contextlib.contextmanager
def buffers_of_plain_tensors(model: nn.Module) -> Iterator[None]:
    """Tensors that are plain attributes are buffers, in no state_dict: export would refuse or freeze them."""
    attributes = [(module, *pair) for module in model.modules() for pair in vars(module).items()]
    plain = [one for one in attributes if isinstance(one[2], Tensor) and not isinstance(one[2], nn.Parameter)]
    for module, name, value in plain:
        delattr(module, name)
        buffer = value.detach()
        setattr(buffer, PLAIN, True)
        module.register_buffer(name, buffer, persistent=False)
    try:
        yield
    finally:
        for module, name, value in plain:
            delattr(module, name)
            setattr(module, name, value)


_is_tracing = False


def tracing() -> contextlib.AbstractContextManager[None]:
    return with_values([(sys.modules[__name__], "_is_tracing", True)])


def is_tracing() -> bool:
    """Whether a capture, or the user's own torch.compile, traces a model. During a capture torch.compiler says what
    models are to believe."""
    return _is_tracing or torch.compiler.is_compiling()


# fmt: off
_SAVED = Obstacle("hooks on the tensors that are saved for the backward, which a graph does not call", "leave them out")
_NO_ZEROS = Obstacle("set_materialize_grads(False), where a graph has zeros",
    "leave it out: an unused output has a gradient of zeros")
_CHECKPOINTED = Obstacle("activation checkpointing that changes results: use_reentrant=True of inputs without a "
    "gradient, or preserve_rng_state=False", "use_reentrant=False, and leave out preserve_rng_state")
_VERSION = Obstacle("_version, which counts the changes of a tensor, and stays as it is in a graph", explain.COUNTED)
_GRAD = Obstacle(".grad, which a graph does not have",
    "write what forward() does where it is None, as zero_grad() leaves it before each step")
_DATA = Obstacle("a change of .data that the backward of an earlier operator reads",
    "change a copy: v = v.clone(), before v.data.copy_(…) or v.data[…] = …")
_INFERENCE_MODE = Obstacle("torch.inference_mode(), through which a graph would send gradients", "torch.no_grad()")
# fmt: on


_DATA_OF = vars(torch._C.TensorBase)["data"]


def copying_data(
    is_copied: Callable[[Tensor, Tensor], bool], read: Callable[[Tensor], Any] = _DATA_OF.__get__
) -> tuple[Any, str, object]:
    """The attribute `.data`, to which the user's code assigns by a copy if `is_copied`."""

    def assign(tensor: Tensor, value: Tensor) -> None:
        if not (_is_users(sys._getframe(1)) and is_copied(tensor, value)):
            _DATA_OF.__set__(tensor, value)
        else:
            with torch.no_grad():
                tensor.copy_(value)

    return Tensor, "data", property(read, assign)


@contextlib.contextmanager
def nothing_lost(*, training: bool) -> Iterator[None]:
    """What a trace would lose raises CaptureError; blocks of torch.utils.checkpoint are called, marked `recompute`."""
    of_tensors = vars(torch._C.TensorBase)
    count_of, grad = of_tensors["_version"].__get__, of_tensors["grad"]
    lines: list[str] = []  # that read `.data`

    def refusing(
        own: Callable[..., Any], obstacle: Obstacle, is_lost: Callable[..., bool] = lambda *given: True
    ) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            if is_lost(*given) and _is_users(sys._getframe(1)):
                raise _refused(obstacle)
            return own(*given)

        return called

    def data_of(tensor: Tensor) -> Any:
        if not _is_users(sys._getframe(1)):
            return _DATA_OF.__get__(tensor)
        lines.append(str(running_line()))
        return tensor.detach()

    def not_reentrant(function: Callable[..., object], preserves: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not preserves:
            raise _refused(_CHECKPOINTED)
        traceback.current_meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        try:
            yield
        finally:
            traceback.current_meta.pop("recompute", None)

    def reentrant(function: Callable[..., object], preserves: bool, *args: Any) -> object:
        has_gradient = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
        with contextlib.contextmanager(not_reentrant)(function, (preserves and has_gradient) or not training):
            return function(*args)

    block, hooks, zeros = torch.inference_mode, saved_tensors_hooks, "set_materialize_grads"
    substitutes = (
        (Tensor, "_version", property(refusing(count_of, _VERSION))),
        (Tensor, "grad", property(refusing(grad.__get__, _GRAD), grad.__set__, grad.__delete__)),
        copying_data(lambda tensor, value: True, data_of),
        (block, "__enter__", refusing(block.__enter__, _INFERENCE_MODE)),
        (hooks, "__enter__", refusing(hooks.__enter__, _SAVED, lambda hook: not isinstance(hook, save_on_cpu))),
        (FunctionCtx, zeros, refusing(getattr(FunctionCtx, zeros), _NO_ZEROS, lambda context, value: not value)),
        (CheckpointFunction, "apply", staticmethod(reentrant)),
        (checkpoint, "_checkpoint_without_reentrant_generator", not_reentrant),
        (record_function, "__enter__", lambda block: block),  # a name for the profiler
        (record_function, "__exit__", lambda block, *of_error: None),
    )
    try:
        with with_values(substitutes):
            yield
    except RuntimeError as error:
        if lines and "modified by an inplace operation" in str(error):
            raise all_occurrences([Occurrence(_DATA, line) for line in dict.fromkeys(lines)], training) from error
        raise


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

_ACTS = {
    *("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.kill"),
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
    *("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg"),
}
"""Audit events of Python. Who writes to a file has opened it."""

_CODE = (".py", ".pyc", ".so")  # that an import opens

_told: Told | None = None
_adding = threading.local()  # what finds a line opens its file


@contextlib.contextmanager
def watched(told: Told) -> Iterator[None]:
    """What the user's code opens and does is added to `told`, and what it prints is dropped."""
    _listen()
    listening = (
        (sys.modules[__name__], "_told", told),
        (logging.Logger, "callHandlers", lambda _, record: _hear_text("a log message", record.pathname)),
        (warnings, "showwarning", lambda message, kind, file, *more: _hear_text("a warning", file)),
    )
    out, errors = contextlib.redirect_stdout(_Printed()), contextlib.redirect_stderr(_Printed())
    with logs_disabled(logging.NOTSET), out, errors, warnings.catch_warnings(action="always"), with_values(listening):
        yield


@cache  # Python has no way to take it back
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event in _ACTS:
        _tell(explain.DONE, event)
    elif event == "open" and not isinstance(path := arguments[0], int) and not str(path).endswith(_CODE):
        _tell(explain.OPENED, str(path))


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
        if not any(file.startswith("<frozen importlib") for file in files) and (line := running_line()) is not None:
            told.setdefault(template, {})[f"{what}, at {line}"] = None
    finally:
        _adding.is_on = False


class _Printed(io.StringIO):
    def write(self, text: str, /) -> int:
        _tell(explain.DONE, "output")
        return len(text)
