"""What a graph cannot hold, found by running the model once in PyTorch and looking at every operator as it passes.

A tracer stops at the first line that it cannot take. Eager PyTorch goes on, so that all of them can be told at once,
each with the user's line. Used only to explain a capture that has failed.
"""

import dis
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from sambasim.compiler.step import is_library_file


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A kind of thing that a graph cannot hold, and how to write it instead."""

    what: str
    rewrite: str


BRANCH = Obstacle(
    "a branch on the value of a tensor",
    "instead of the branch: torch.where(condition, a, b), or torch.cond(condition, f, g, args) with functions f and g",
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
PARAMETER = Obstacle(
    "a parameter that is changed in place",
    "make a new tensor of it, or register_buffer() what forward() changes: the optimizer alone changes parameters",
)
COMPLEX = Obstacle(
    "complex numbers, which a PEF cannot hold", "compute with the real and the imaginary part as two real tensors"
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
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings: list[Finding] = []
        self._inputs = {_memory(tensor) for tensor in inputs}
        self._parameters = {_memory(tensor): tensor for tensor in step.parameters()}
        self._saved: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        obstacle = _obstacle(func, args)
        for tensor in _written(func, args):
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
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, value in self._saved:
                parameter.copy_(value)

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
        frames = list(_frames())
        frame = next((frame for frame in frames if not is_library_file(frame.f_code.co_filename)), None)
        if frame is None:
            return
        file, line = frame.f_code.co_filename, frame.f_lineno
        code = linecache.getline(file, line).strip()
        if obstacle is NUMBER:
            if frame is not frames[0] or code.startswith("assert"):
                return  # tracers know where torch's own code looks at values, and how to leave out an assertion
            obstacle = BRANCH if _branches(frame) else NUMBER
        finding = Finding(obstacle, f"{file}:{line}: {code}")
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


def _written(func: OpOverload, args: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
            yield value


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


def _branches(frame: FrameType) -> bool:
    """Whether the instruction that `frame` is at turns a tensor into a condition; otherwise it is a call."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "JUMP" in name or name in ("TO_BOOL", "UNARY_NOT")
