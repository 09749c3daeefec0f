"""What a graph cannot hold, found by running the model in PyTorch and looking at what it does.

A tracer stops at the first line that it cannot take. Eager PyTorch goes on, so that all of them can be told at once,
each with the user's line: `Watch` looks at every operator, to explain a capture that has failed.

Other things a tracer takes, and loses without a word: a backward of the user's own, a gradient hook, state that is
kept by assignment. `lost_effects` finds them before a capture, in a call on fake tensors, which computes nothing.
"""

import contextlib
import dis
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.compiler.recorder import written
from sambasim.compiler.step import is_library_file
from sambasim.compiler.trial import trial


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A kind of thing that a graph cannot hold, and how to write it instead."""

    what: str
    rewrite: str


BRANCH = Obstacle(
    "a branch on the value of a tensor",
    "compute both sides, and choose by torch.where(condition, a, b)",
)
NUMBER = Obstacle(
    "the value of a tensor as a Python number", "keep it a tensor: leave out .item(), float(), int() and .tolist()"
)
SHAPE = Obstacle(
    "a shape that depends on the values of a tensor",
    "keep every element: torch.where(mask, a, b), or a mask to multiply by, instead of a selection",
)
PACKED = Obstacle(
    "a packed sequence, whose shape depends on lengths",
    "run the recurrent layer on the padded batch, and mask its outputs: outputs * mask.unsqueeze(-1)",
)
INPUT = Obstacle("an input that is changed in place", "make a new tensor: x = x * 2 instead of x.mul_(2) or x *= 2")
CONSTANT = Obstacle(
    "a tensor that is changed in place, and is no buffer of the model",
    "register it: self.register_buffer(name, tensor)",
)
UNREGISTERED = Obstacle(
    "a parameter that is none of the model's",
    "give it to the model: an attribute of a module, an nn.ModuleList for a list of layers",
)
PARAMETER = Obstacle(
    "a parameter that is changed in place",
    "make a new tensor of it, or register_buffer() what forward() changes: the optimizer alone changes parameters",
)
COMPLEX = Obstacle(
    "complex numbers, which a PEF cannot hold", "compute with the real and the imaginary part as two real tensors"
)

ASSIGNED = Obstacle(
    "state that forward() keeps by assignment, from one call to the next",
    'keep it in a buffer, self.register_buffer("ema", torch.zeros(())), and change that in place: self.ema.copy_(…)',
)
HOOK = Obstacle(
    "a gradient hook, which a graph does not call",
    "write what it does to the gradient as operators of forward(), or leave it out",
)


def own_backward(name: str) -> Obstacle:
    """What the torch.autograd.Function called `name` is to a graph."""
    return Obstacle(
        f"the backward of {name}, a torch.autograd.Function, which a graph does not keep",
        "write its forward with PyTorch's own differentiable operators, and leave the backward to autograd",
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One obstacle, and the user's line: `file:line: code`."""

    obstacle: Obstacle
    where: str


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own methods are untyped here and below
    """Around one eager call of `step` on `inputs`: gathers `findings`, in the order of execution, each line once.

    Parameters that the call changes in place have their old values again afterwards.
    """

    def __init__(self, step: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.findings: list[Finding] = []
        self._inputs = {_memory(tensor) for tensor in inputs}
        self._parameters = {_memory(tensor): tensor for tensor in step.parameters()}
        self._known = {*self._inputs, *self._parameters}
        self._saved: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        obstacle = _obstacle(func, args) or self._unregistered(args)
        for tensor in written(func, args, kwargs or {}):
            obstacle = obstacle or self._changed(tensor)
        result = func(*args, **(kwargs or {}))
        if obstacle is None and isinstance(result, Tensor) and result.is_complex():
            obstacle = COMPLEX
        if obstacle is not None:
            self._find(obstacle)
        return result

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]  # torch's, untyped
        with torch.no_grad():
            for parameter, value in self._saved:
                parameter.copy_(value)

    def _unregistered(self, args: tuple[Any, ...]) -> Obstacle | None:
        """Whether `args` hold a parameter that the model does not have: told once for each."""
        parameters = {_memory(leaf) for leaf in tree_leaves(args) if isinstance(leaf, nn.Parameter)}
        strangers = parameters - self._known
        self._known |= strangers
        return UNREGISTERED if strangers else None

    def _changed(self, tensor: Tensor) -> Obstacle | None:
        """What `tensor`, which is about to be written to, is a view of."""
        memory = _memory(tensor)
        if memory == 0:
            return None
        if memory in self._inputs:
            return INPUT
        if memory not in self._parameters:
            return None
        parameter = self._parameters[memory]
        if all(parameter is not saved for saved, _ in self._saved):
            self._saved.append((parameter, parameter.detach().clone()))
        return PARAMETER

    def _find(self, obstacle: Obstacle) -> None:
        innermost = next(_frames(), None)
        frame = _user_frame()
        if frame is None:
            return
        where = _where(frame)
        if obstacle is NUMBER:
            if frame is not innermost or linecache.getline(*_line(frame)).strip().startswith("assert"):
                return  # tracers know where torch's own code looks at values, and how to leave out an assertion
            obstacle = BRANCH if _branches(frame) else NUMBER
        finding = Finding(obstacle, where)
        if finding not in self.findings:
            self.findings.append(finding)


def _memory(tensor: Tensor) -> int:
    """The address of the memory that `tensor` is a view of; 0 for one without elements, or that is not dense."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _obstacle(func: OpOverload, args: tuple[Any, ...]) -> Obstacle | None:
    """What in the way of a graph `func` is, told from the operator alone."""
    name = func._schema.name
    if name == "aten::_pack_padded_sequence":
        return PACKED
    if name == "aten::index":  # by numbers its shape is known, by a mask it is not
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return SHAPE if masks else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return SHAPE
    return NUMBER if torch.Tag.data_dependent_output in func.tags else None


_TORCH = Path(torch.__file__).parent
_HAND_ON = ("_tensor.py", "_ops.py", "_compile.py", "_dynamo/eval_frame.py", "utils/_stats.py")
_TRANSPARENT = (__file__, *(str(_TORCH / name) for name in _HAND_ON))
"""Files that only hand a call on, between the line that uses a tensor and `__torch_dispatch__`."""


def _frames() -> Iterator[FrameType]:
    """The calling frames, innermost first, from the one that called the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _TRANSPARENT:
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_frame() -> FrameType | None:
    return next((frame for frame in _frames() if not is_library_file(frame.f_code.co_filename)), None)


def _line(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


def _where(frame: FrameType) -> str:
    file, line = _line(frame)
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def _branches(frame: FrameType) -> bool:
    """Whether the instruction that `frame` is at turns a tensor into a condition; otherwise it is a call."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "JUMP" in name or name in ("TO_BOOL", "UNARY_NOT")


def lost_effects(step: nn.Module, inputs: Sequence[Tensor], *, fake: bool = True) -> Sequence[Finding] | None:
    """What `step` does that a capture would lose without a word, in the mode that it is set to; in training mode, also
    what evaluation would miss. With `fake`, nothing is computed.

    The model, the inputs and the random generators are left as they are. Returns None if the call fails, which says
    nothing of the model: fake tensors have no values to look at.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    convert: Callable[[Tensor], Tensor] = mode.from_tensor if mode else _cloned
    effects = _Effects(step.training)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(trial(step, convert))
            given = [convert(tensor) for tensor in inputs]
            if mode:
                stack.enter_context(mode)
            stack.enter_context(effects.recorded())
            step(*given)
            if effects.written:  # is it state, or made anew by every call?
                effects.next_call()
                step(*given)
            if effects.written and step.training:
                effects.next_call(only_written=True)
                step.eval()(*given)
    except (Exception, SystemExit):
        return effects.findings or None
    return effects.findings


_REFUSED_BY_NAME = ("torch.utils.checkpoint", "torch._library.autograd")
"""Where torch makes a Function of checkpointing and of a user's operator, which capture and translation refuse."""


class _Effects:
    """Records what modules are assigned, and what else a graph would lose.

    A number or tensor is state if a call reads it before it assigns it: then it comes from the call before. What is
    only assigned, or read afterwards, as the parts of a loss often are, is made anew by every call. A buffer that a
    state_dict holds is state in any case.
    """

    def __init__(self, training: bool) -> None:
        self.findings: list[Finding] = []
        self.written: dict[tuple[int, str], str] = {}
        self._training = training
        self._touched: set[tuple[int, str]] = set()
        self._read: set[tuple[int, str]] = set()
        self._only_written = False

    def next_call(self, *, only_written: bool = False) -> None:
        """Another call of the model begins. With `only_written`, what the call before wrote must not be read."""
        self._touched.clear()
        self._read.clear()
        if not only_written:
            self.written.clear()  # what a second call does not write again is a cache, which every call may read
        self._only_written = only_written

    def _find(self, obstacle: Obstacle, where: str) -> None:
        finding = Finding(obstacle, where)
        if finding not in self.findings:
            self.findings.append(finding)

    def _reads(self, module: nn.Module, name: str) -> None:
        key = id(module), name
        if key not in self._touched:
            self._touched.add(key)
            self._read.add(key)
            if self._only_written and key in self.written:
                self._find(ASSIGNED, self.written[key])

    def _writes(self, module: nn.Module, name: str, value: object) -> None:
        key = id(module), name
        state = vars(module)
        buffers, parameters = state.get("_buffers", {}), state.get("_parameters", {})
        old = next((place[name] for place in (parameters, buffers, state) if name in place), None)
        self._touched.add(key)
        frame = _user_frame()
        if frame is None or old is value or not (_is_state(old) or _is_state(value)):
            return
        if not isinstance(old, Tensor) and not isinstance(value, Tensor) and old == value:
            return
        self.written.setdefault(key, _where(frame))
        kept = name in parameters or (name in buffers and name not in state["_non_persistent_buffers_set"])
        if kept or (key in self._read and _is_state(old)):
            self._find(ASSIGNED, _where(frame))

    def _calls(self, obstacle: Obstacle) -> None:
        frame = _user_frame()
        if self._training and not self._only_written and frame is not None:
            self._find(obstacle, _where(frame))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While this is active, every module and tensor of the process tells what is done to it."""
        set_attribute, get_attribute = nn.Module.__setattr__, nn.Module.__getattribute__
        apply = torch.autograd.Function.__dict__["apply"]
        hooks = {name: getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")}

        def assigned(module: nn.Module, name: str, value: Any) -> None:
            self._writes(module, name, value)
            set_attribute(module, name, value)

        def looked_up(module: nn.Module, name: str) -> object:
            if not name.startswith("__"):
                self._reads(module, name)
            return get_attribute(module, name)

        def applied(cls: type, *args: Any, **kwargs: Any) -> object:
            if cls.__module__ not in _REFUSED_BY_NAME:
                self._calls(own_backward(cls.__qualname__))
            return apply.__func__(cls, *args, **kwargs)

        def hooked(register: Callable[..., object]) -> Callable[..., object]:
            def registered(tensor: Tensor, *args: Any, **kwargs: Any) -> object:
                self._calls(HOOK)
                return register(tensor, *args, **kwargs)

            return registered

        with contextlib.ExitStack() as stack:
            for owner, name, stand_in, own in (
                (nn.Module, "__setattr__", assigned, set_attribute),
                (nn.Module, "__getattribute__", looked_up, None),
                (torch.autograd.Function, "apply", classmethod(applied), apply),
                *((Tensor, name, hooked(register), register) for name, register in hooks.items()),
            ):
                if own is None:
                    stack.callback(delattr, owner, name)
                else:
                    stack.callback(setattr, owner, name, own)
                setattr(owner, name, stand_in)
            yield


def _cloned(tensor: Tensor) -> Tensor:
    clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone


def _is_state(value: object) -> bool:
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)
