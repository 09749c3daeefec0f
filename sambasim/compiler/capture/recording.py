"""Records one call: its operators, with what each reads, writes and makes, and the user's line. State, obstacles and
fingerprints are functions of such a list. Finds lines of the user's program in calls, stacks and errors."""

import hashlib
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.compiler.capture.sharing import Sharing, is_dense, kept_address, storage_of
from sambasim.errors import CaptureError
from sambasim.ir.graph import SourceLine
from sambasim.pef.archive import bytes_of
from sambasim.whose_code import is_library_file, is_ours, is_package_file, torch_folder

RUNNING = ("running_mean", "running_var")  # arguments that batch_norm writes to, though its schema does not say so

_LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Of torch.tensor(), which makes its tensor by no operator."""

_ATTRIBUTES = {torch.ops.prim.device.default}  # that a fake tensor is asked for, and no operators

_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Line(NamedTuple):
    """A line of the user's. `inside`: the line of an installed library that it calls, and that calls the operator."""

    file: str
    number: int
    inside: str = ""

    def __str__(self) -> str:
        return line_of(self.file, self.number)


@dataclass(frozen=True, slots=True)
class Op:
    """`text`: the operator, its numbers, and by labels the tensors that it reads. `writes`: labels of what existed
    before and is changed. `function`: of torch, with the number of its arguments, such as `one_hot/1`; empty if a
    capture has the answer. `line`: None in code of libraries alone. `asks`: the shape of its result, or a Python
    number, depends on values; `draws_from`: it draws from a generator of the user's own; `foreign`: labels of
    what it reads that requires a gradient, and is none of the model's; `buffers`: those that alone it depends on."""

    func: OpOverload
    text: str
    writes: tuple[str, ...]
    function: str
    line: Line | None
    asks: bool
    draws_from: bool
    foreign: tuple[str, ...]
    buffers: frozenset[str] | None


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own methods are untyped here and below
    """Around one call: records `ops`. Tensors have labels: those of `named`, `%3.0` for what the third operator made,
    the digest of their bytes for others. `seeded`: the generator of random numbers was set by hand."""

    supports_higher_order_operators = True

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.ops: list[Op] = []
        self.foreign: dict[str, Tensor] = {}  # by label what could be trained, and is none of the model's
        self.function, self.seeded = "", False
        self.made_bytes = 0
        self._labels = {storage_of(tensor): label for label, tensor in named.items() if is_dense(tensor)}
        self._known = len(self._labels)
        self._alive: list[object] = list(named.values())  # so that nothing else gets a storage that is gone
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._sharing = Sharing(self._labels)
        buffers = {label: tensor for label, tensor in named.items() if label.startswith("buffer ")}
        self._made_of = {storage_of(tensor): frozenset({label}) for label, tensor in buffers.items()}
        self._generator = _random_state()
        self._states: set[bytes] = set()
        self._draws_again = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks this; its own answer would import a tracer, in seconds, to keep it from tracing this class."""
        return False

    def label(self, tensor: Tensor) -> str:
        if not is_dense(tensor):
            return f"{tensor.layout}"
        storage = storage_of(tensor)
        if storage not in self._labels:
            self._labels[storage] = "" if isinstance(tensor, FakeTensor) else digest_of(tensor)
            self._alive.append(tensor)
        return self._labels[storage]

    def form(self, tensor: Tensor) -> str:
        """The label, and how the tensor lies in its memory."""
        place = f" {tensor.storage_offset()} {tensor.stride()}" if is_dense(tensor) else ""
        return f"{self.label(tensor)} {tensor.dtype} {tuple(tensor.shape)}{place}"

    def made_of(self, tensors: Iterable[Tensor]) -> frozenset[str] | None:
        """The buffers that `tensors` are computed from; None if they depend on anything else that may change."""
        made = frozenset[str]()
        for tensor in filter(is_dense, tensors):
            otherwise = None if is_named(self.label(tensor)) else frozenset[str]()
            if (part := self._made_of.get(storage_of(tensor), otherwise)) is None:
                return None
            made |= part
        return made

    def is_kept(self, tensor: Tensor, value: Tensor) -> bool:
        """Whether to give a buffer the memory of `value` is to copy it, as the call has made that."""
        is_state = self.label(tensor).startswith("buffer ") and self.label(value).startswith("%")
        fits = is_state and (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
        return self._sharing.begins(tensor, value, fits, saved=storage_of(tensor) in self._saved)

    def has_changed(self, value: object) -> bool:
        return is_dense(value) and storage_of(value) in self._saved

    def undo(self) -> None:
        """Tensors that existed before the call have their values again."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for tensor, value in self._saved.values():
                tensor.detach().copy_(value)

    def is_seeded(self) -> bool:
        """Whether something else than a draw has changed the generator."""
        return self.seeded or _random_state() != self._generator

    def know(self, begin: int) -> None:
        """A capture has the answers to what the operators from `begin` on ask."""
        self.ops[begin:] = [replace(op, function="") for op in self.ops[begin:]]

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _ATTRIBUTES:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            what, where = f"torch.{func}, which a PEF cannot hold", str(running_line() or "")
            remedy = "write it with operators on tensors, such as torch.where(condition, a, b) for torch.cond"
            raise CaptureError(what, where=where, remedy=remedy)
        if func is torch.ops.aten._efficientzerotensor.default:  # PyTorch crashes in operators that take one in a mode
            func = torch.ops.aten.zeros.default
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        text = f"{func} {[self.form(leaf) if isinstance(leaf, Tensor) else _text(leaf) for leaf in leaves]}"
        changed, in_forward = [*written(func, args, kwargs)], torch._C._current_graph_task_id() < 0
        if in_forward and self._sharing.shows(tensors, changed, args[1] if len(args) > 1 else None):
            what = "memory that tensors share since one was assigned to .data of another, or that this one had before"
            remedy = "copy: a.data.copy_(b) for a.data = b; and, to keep what a was, old = a.detach().clone() before"
            raise CaptureError(f"{what}, is used", where=str(running_line() or ""), remedy=remedy)
        writes = [tensor for tensor in changed if not self.label(tensor).startswith("%")]
        for tensor in writes:
            self._save(tensor)
        draws_from = any(isinstance(leaf, torch.Generator) and leaf is not torch.default_generator for leaf in leaves)
        is_random = torch.Tag.nondeterministic_seeded in func.tags and not draws_from
        if is_random:
            self.check_generator()
        late, before = "", list[Tensor]()
        if writes and not in_forward:  # a backward does so, or recomputes a forward
            late = "recomputed " if _is_again() else "late "
            if _is_again():
                before = [tensor.detach().clone() for tensor in writes if not isinstance(tensor, FakeTensor)]
        labels = tuple(map(self.label, writes))  # before set_() gives a tensor another memory
        result = func(*args, **kwargs)
        if late and not (before and all(map(torch.equal, writes, before))):  # the same again changes nothing
            labels = tuple(f"{late}{label}" for label in labels)
        if is_random:
            self._generator = _random_state()
        asks = not _ASKING.isdisjoint(func.tags) or func is torch.ops.aten._pack_padded_sequence.default
        if func is torch.ops.aten.index.Tensor:  # by numbers its shape is known
            asks = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)
        leaves_to_train = {self.label(tensor): tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
        foreign = tuple(label for label in leaves_to_train if not is_named(label))
        self.foreign |= {label: leaves_to_train[label] for label in foreign}
        made_of = self.made_of(tensors) if not is_random and not draws_from else None
        line = running_line(is_obstacle=asks or bool(labels or foreign))
        self.ops.append(Op(func, text, labels, self.function, line, asks, draws_from, foreign, made_of))
        for made in filter(is_dense, tree_leaves(result)):
            self._made_of.pop(storage_of(made), None)
            if made_of is not None:
                self._made_of[storage_of(made)] = made_of
            if storage_of(made) not in self._labels or func in _LIFTED:
                self._labels[storage_of(made)] = f"%{len(self.ops)}.{len(self._labels) - self._known}"
                self._alive.append(kept_address(made))
                self.made_bytes += made.untyped_storage().nbytes()
        return result

    def _save(self, tensor: Tensor) -> None:
        if is_dense(tensor) and storage_of(tensor) not in self._saved and not isinstance(tensor, FakeTensor):
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self._saved[storage_of(tensor)] = whole, whole.clone()

    def check_generator(self) -> None:
        """A draw, and the end of the call, go on where the last draw ended. torch.utils.checkpoint may draw again."""
        now = _random_state()
        if self.is_seeded():
            self._draws_again |= _is_again()
            self.seeded |= not self._draws_again or now not in self._states
        self._states.add(now)


def _is_again() -> bool:
    """Whether torch.utils.checkpoint calls."""
    return any(frame.f_code.co_filename == _CHECKPOINT for frame in frames())


def _random_state() -> bytes:
    with torch._C._DisableTorchDispatch():  # or a mode of fake tensors has the state, which has no values
        return torch.get_rng_state().numpy().tobytes()


def written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call of `func` writes to, by its schema, or as batch_norm does in training."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | {**kwargs}
    undeclared = RUNNING if given.get("training") and "backward" not in func.__name__ else ()
    for argument in func._schema.arguments:
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (leaf for leaf in tree_leaves(given.get(argument.name)) if isinstance(leaf, Tensor))


def digest_of(tensor: Tensor) -> str:
    with torch._C._DisableTorchDispatch():
        return hashlib.sha256(bytes_of(tensor.detach().resolve_conj().resolve_neg())).hexdigest()[:16]


def role_of(tensor: Tensor) -> str:
    """A frozen parameter, which a call may change, is a buffer."""
    return "parameter" if isinstance(tensor, nn.Parameter) and tensor.requires_grad else "buffer"


def is_named(label: str) -> bool:
    return label.startswith(("parameter ", "buffer ", "input ", "%"))


def _text(value: object) -> str:
    return repr(value) if isinstance(value, (*_PLAIN, type(None))) else str(type(value))


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_TORCH = Path(torch_folder())
_CHECKPOINT = str(_TORCH / "utils" / "checkpoint.py")
_OWN_FORWARDING = ("recording", "asked_values", "trial", "as_eager")
_FORWARDING = ("_tensor.py", "_ops.py", "_compile.py", "_dynamo/eval_frame.py", "utils/_stats.py")
_TRANSPARENT = (
    *(str(_TORCH / name) for name in _FORWARDING),
    *(str(Path(__file__).with_name(f"{name}.py")) for name in _OWN_FORWARDING),
)
"""Files that only forward a call, between the line that uses a tensor and `__torch_dispatch__`."""

_COMPILER = str(Path(__file__).parent.parent)


def frames() -> Iterator[FrameType]:
    """Those of the step that is called, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _TRANSPARENT:
        frame = frame.f_back
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_COMPILER) and file not in _TRANSPARENT:
            return
        yield frame
        frame = frame.f_back


def _users() -> Iterator[FrameType]:
    return (frame for frame in frames() if not is_library_file(frame.f_code.co_filename))


def running_line(*, is_obstacle: bool = True) -> Line | None:
    """`is_obstacle`: an error may name it, which points at no line of a library that a line of the user's calls."""
    users = _users()
    if (inner := next(users, None)) is None:
        return None
    outer = inner
    if is_obstacle and is_package_file(inner.f_code.co_filename):
        outer = next((frame for frame in users if not is_package_file(frame.f_code.co_filename)), inner)
    inside = "" if outer is inner else line_of(inner.f_code.co_filename, inner.f_lineno)
    return Line(outer.f_code.co_filename, outer.f_lineno, inside)


def mark_line(*, is_users: bool = True) -> None:
    """What is traced next has the line that is running, or none where that is not the user's."""
    traceback.current_meta.pop("stack_trace", None)
    if is_users and (frame := next(_users(), None)) is not None:
        file, line, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        code = linecache.getline(file, line).strip()
        traceback.current_meta["stack_trace"] = f'  File "{file}", line {line}, in {name}\n    {code}\n'


def line_of(file: str, number: int) -> str:
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def changing_line(
    run: Callable[[int], object], watched: Callable[[], object], begin: int, stride: int
) -> tuple[int, str | None]:
    """Calls `run` with 1, 2 … until `watched` gives something else, asked every `stride` events of Python's trace from
    `begin` on. Returns the last event without a change, and the line before the look that found one."""
    before, count, seen = watched(), 0, begin
    last: tuple[str, int] | None = None
    found: list[str | None] = []

    def look(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal last, count, seen
        if found or is_library_file(frame.f_code.co_filename):
            return None
        count += 1
        if count >= seen + stride:
            if watched() == before:
                seen = count
            else:
                found.append(None if last is None else line_of(*last))
        if last is None or not is_package_file(frame.f_code.co_filename) or is_package_file(last[0]):
            last = frame.f_code.co_filename, frame.f_lineno
        return look

    sys.settrace(look)
    try:
        for number in range(1, 4):
            if not found:
                run(number)
    finally:
        sys.settrace(None)
    return seen, found[0] if found else None


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def source_line(node: fx.Node) -> SourceLine | None:
    """The innermost line of the user's program that made `node`, its file relative to where Python imported it from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    last = next((frame for frame in reversed(frames) if not is_library_file(frame[0])), None)
    return SourceLine(_imported_as(last[0]), int(last[1]), last[2].strip()) if last else None


def _imported_as(path: str) -> str:
    folders = [entry for entry in (*sys.path, os.getcwd()) if entry and path.startswith(f"{entry.rstrip('/')}/")]
    return os.path.relpath(path, max(folders, key=len)) if folders else os.path.basename(path)


def source_files(model: nn.Module) -> set[str]:
    """The files of the user's classes in `model`, named as in `source_line`, and not those of a prompt or of code."""
    classes = {type(module) for module in model.modules()}
    written = {cls for cls in classes if hasattr(sys.modules.get(cls.__module__), "__file__")}
    files = map(inspect.getsourcefile, written)
    return {_imported_as(file) for file in files if file is not None and not is_library_file(file)}


def read_by(node: fx.Node) -> str | None:
    return next((str(line) for line in map(source_line, node.users) if line), None)


def is_bug(error: BaseException) -> bool:
    """Whether code of sambasim raised `error`, itself or by Python's own library."""
    for frame in reversed(extract_tb(error.__traceback__)):
        is_forwarding = frame.name in ("__torch_function__", "__torch_dispatch__", "set_data")
        if is_ours(frame.filename) and not is_forwarding:
            return True
        if frame.filename.startswith(torch_folder()) or not is_library_file(frame.filename):
            return False
    return True


def first_line(function: Any) -> Line | None:
    """Where `function` begins; None if it was not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else Line(code.co_filename, code.co_firstlineno)


def forward_line(model: nn.Module) -> str | None:
    """The first line of its `forward`; None if that is a library's."""
    line = first_line(model.forward)
    return None if line is None or is_library_file(line.file) else str(line)
