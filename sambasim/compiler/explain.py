"""Why a step cannot be captured: which lines, and how to write them instead. After a failed capture the model runs once
under `Watch`, which finds all obstacles."""

import contextlib
import dis
import linecache
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.compiler.names import forward_line, is_library_file, line_in, user_line
from sambasim.compiler.step import TrainingStep, check_loss, loss_in, run_eagerly
from sambasim.compiler.trial import written
from sambasim.errors import CaptureError, UserError


@dataclass(frozen=True, slots=True)
class Obstacle:
    what: str
    rewrite: str


@dataclass(frozen=True, slots=True)
class Finding:
    obstacle: Obstacle
    where: str


_BRANCH = Obstacle(
    "a branch on the value of a tensor", "compute both sides, and choose by torch.where(condition, a, b)"
)
_NUMBER = Obstacle(
    "the value of a tensor as a Python number",
    "keep it a tensor: leave out .item(), float(), int(), .tolist(); "
    "a[t] of a tensor t is a.index_select(0, t.view(1))[0]",
)
_VALUE = Obstacle(
    "Python code that depends on the value of a tensor", "compute with tensors only: torch.where, torch.rand"
)
SHAPE = Obstacle(
    "a shape that depends on the values of a tensor",
    "keep every element: torch.where(mask, a, b), or a mask to multiply by, instead of a selection",
)
_PACKED = Obstacle(
    "a packed sequence, whose shape depends on lengths",
    "run the recurrent layer on the padded batch, and mask its outputs: outputs * mask.unsqueeze(-1)",
)
_CHECKPOINTING = Obstacle("activation checkpointing", "call the block itself, without torch.utils.checkpoint")
_NUMPY = Obstacle(
    "NumPy, which a graph does not call", "write it with PyTorch: torch.tanh(x) instead of np.tanh(x.numpy())"
)
_LENGTHS = Obstacle(
    "ctc_loss() with lengths that are numbers", "give both lengths as tensors: torch.full((batch,), length)"
)
_INPUT = Obstacle("an input that is changed in place", "make a new tensor: x = x * 2 instead of x.mul_(2) or x *= 2")
CHANGED_CONSTANT = Obstacle(
    "a tensor that is changed in place, and is no buffer of the model",
    "register it: self.register_buffer(name, tensor)",
)
_UNREGISTERED = Obstacle(
    "a parameter that is none of the model's",
    "give it to the model: an attribute of a module, an nn.ModuleList for a list of layers",
)
_PARAMETER = Obstacle(
    "a parameter that is changed in place",
    "make a new tensor of it, or register_buffer() what forward() changes: the optimizer alone changes parameters",
)
_KNOWN = (
    (("pack_padded_sequence", "PackedSequence"), _PACKED),
    (("tag_activation_checkpoint", "_checkpoint_context_fn"), _CHECKPOINTING),
    (("data-dependent branching", "Data-dependent branching"), _BRANCH),
    (("Tensor.item()", "_local_scalar_dense", ".tolist()", "Tensor.tolist"), _NUMBER),
    (("data-dependent expression", "GuardOnDataDependent"), _VALUE),
    (("is mutated in the forward",), CHANGED_CONSTANT),
    (("trace_numpy",), _NUMPY),
    (("nonzero", "dynamic shape", "Dynamic shape", "DynamicOutputShape", "masked_select", "unbacked"), SHAPE),
)
"""Parts of a tracer's message, and their obstacle; the first row that fits."""

_MOST_FINDINGS = 6
_LONGEST_LINE = 160


def tracer_error(what: str, error: BaseException) -> CaptureError:
    """The CaptureError for what the tracer raised while it captured `what`, with the user's line if it names one."""
    text = f"{type(error).__name__}: {error}"
    known = next((obstacle for marks, obstacle in _KNOWN if any(mark in text for mark in marks)), None)
    line = line_in(str(error))
    return CaptureError(
        f"the {what} cannot be captured: {known.what if known else _explanation(error)}",
        where=str(line) if line else user_line(error),
        remedy=known.rewrite if known else _hint(error),
    )


_END_OF_EXPLANATION = re.compile(
    r"\n\s*(?:Explanation:|Hint:|Developer debug context|For more |from user code|The error above|While executing)"
)


def _explanation(error: BaseException) -> str:
    """The first line of torch's message, and its explanation if there is one: no hints, links and frames."""
    text = str(error).strip()
    first = _END_OF_EXPLANATION.split(text)[0].strip().splitlines()
    sentences = [*first[:1], *re.findall(r"\n\s*Explanation: (.+)", text)[:1]]
    lines = [line for line in map(_without_advice, sentences) if line] or [f"PyTorch raises {type(error).__name__}"]
    return "\n    ".join(line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…" for line in lines)


_OTHER_ADVICE = re.compile(
    r"https?://|www\.|pytorch\.org|github|\b(issue|bug)s?\b|please report|torch\._dynamo|torch\.compile|TORCH_?LOGS|"
    r"TORCH\w*=|compiled? (region|code)|graph break|find(ing)? a workaround",
    re.IGNORECASE,
)
"""Advice for users of torch.compile: to write to PyTorch's authors, to set its options."""


def _without_advice(text: str) -> str:
    sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"\b(Torch)?Dynamo\b", "PyTorch's tracer", text.strip()))
    return " ".join(sentence for sentence in sentences if not _OTHER_ADVICE.search(sentence))


def _hint(error: BaseException) -> str:
    hints: list[str] = [hint.strip() for hint in re.findall(r"Hint: (.+)", str(error))]
    sensible = [hint for hint in hints if 0 < len(hint) <= _LONGEST_LINE and not _OTHER_ADVICE.search(hint)]
    return _without_advice(sensible[0]) if sensible else "rewrite the line with PyTorch's own operators on tensors"


def explained(error: CaptureError, step: nn.Module, inputs: Sequence[Tensor], loss: str | None) -> UserError:
    """The most helpful error for a capture of `step` that failed with `error`; `loss` is the name of its loss. Raises
    ModelError if PyTorch cannot run the model either."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by `_memory`
        findings = _findings(step, [tensor.clone() for tensor in inputs], loss)
    if findings:
        return all_findings(findings, step.training)
    if not step.training and "autograd.grad" in (error.where or ""):
        error.remedy = "with torch.enable_grad(): around it and what it reads; evaluation is captured without gradients"
    line = forward_line(step.get_submodule("model"))
    error.where = error.where or (None if line is None or is_library_file(line) else line)
    return error


def _findings(step: nn.Module, inputs: Sequence[Tensor], loss: str | None) -> Sequence[Finding]:
    watch = Watch(step, inputs)
    outputs = run_eagerly(step, inputs, watch)
    if step.training:
        check_loss(loss_in(outputs), loss, any_shape=isinstance(step, TrainingStep) and step.any_loss)
        with contextlib.suppress(Exception), watch:  # a backward of the user's own may hold obstacles too
            wanted = [parameter for parameter in step.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss_in(outputs).sum(), wanted, allow_unused=True)
    return watch.findings


def _rewrite(finding: Finding) -> str:
    if "-packages" not in finding.where:
        return finding.obstacle.rewrite
    return (
        f"that is code of a library: choose settings of the model that do not run it; else {finding.obstacle.rewrite}"
    )


def all_findings(findings: Sequence[Finding], training: bool) -> CaptureError:
    what = f"the {'training step' if training else 'evaluation graph'} cannot be captured"
    if len(findings) == 1:
        finding = findings[0]
        return CaptureError(f"{what}: {finding.obstacle.what}", where=finding.where, remedy=_rewrite(finding))
    lines = [f"{finding.where}   ({finding.obstacle.what})" for finding in findings[:_MOST_FINDINGS]]
    if len(findings) > _MOST_FINDINGS:
        lines.append(f"and {len(findings) - _MOST_FINDINGS} more lines")
    rewrites = dict.fromkeys(map(_rewrite, findings))
    return CaptureError(
        "\n    ".join((f"{what}, for {len(findings)} reasons:", *lines)), remedy="\n         ".join(rewrites)
    )


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own methods are untyped here and below
    """Around one eager call of `step`: gathers `findings` in the order of execution. Parameters that the call changes
    in place have their old values again afterwards."""

    def __init__(self, step: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.findings: list[Finding] = []
        self._inputs = {_memory(tensor) for tensor in inputs}
        self._parameters = {_memory(tensor): tensor for tensor in step.parameters()}
        self._known = {*self._inputs, *self._parameters}
        self._saved: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        obstacle = _obstacle(func, args) or self._unregistered(args)
        for tensor in written(func, args, kwargs or {}):
            obstacle = obstacle or self._changed(tensor)
        result = func(*args, **(kwargs or {}))
        if obstacle is not None:
            self._find(obstacle)
        return result

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]  # torch's, untyped
        with torch.no_grad():
            for memory, value in self._saved.items():
                self._parameters[memory].copy_(value)

    def _unregistered(self, args: tuple[Any, ...]) -> Obstacle | None:
        parameters = {_memory(leaf) for leaf in tree_leaves(args) if isinstance(leaf, nn.Parameter)}
        unknown = parameters - self._known
        self._known |= unknown
        return _UNREGISTERED if unknown else None

    def _changed(self, tensor: Tensor) -> Obstacle | None:
        memory = _memory(tensor)
        if memory == 0:
            return None
        if memory in self._inputs:
            return _INPUT
        if memory not in self._parameters:
            return None
        if memory not in self._saved:
            self._saved[memory] = self._parameters[memory].detach().clone()
        return _PARAMETER

    def _find(self, obstacle: Obstacle) -> None:
        frame = user_frame()
        if frame is None:
            return
        where = where_of(frame)
        if obstacle is _NUMBER:
            if frame is not next(_frames(), None) or where.partition(": ")[2].startswith("assert"):
                return  # tracers know where torch's own code reads values, and how to leave out an assertion
            operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            obstacle = _BRANCH if "JUMP" in operation or operation in ("TO_BOOL", "UNARY_NOT") else _NUMBER
        finding = Finding(obstacle, where)
        if finding not in self.findings:
            self.findings.append(finding)


def _memory(tensor: Tensor) -> int:
    """The address of the memory that `tensor` is a view of; 0 for one without elements, or that is not dense."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _obstacle(func: OpOverload, args: tuple[Any, ...]) -> Obstacle | None:
    name = func._schema.name
    if name == "aten::_pack_padded_sequence":
        return _PACKED
    if name == "aten::_ctc_loss":
        return _LENGTHS
    if name == "aten::index":  # by numbers its shape is known, by a mask it is not
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return SHAPE if masks else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return SHAPE
    return _NUMBER if torch.Tag.data_dependent_output in func.tags else None


_TORCH = Path(torch.__file__).parent
_FORWARDING = ("_tensor.py", "_ops.py", "_compile.py", "_dynamo/eval_frame.py", "utils/_stats.py")
_TRANSPARENT = (__file__, *(str(_TORCH / name) for name in _FORWARDING))
"""Files that only forward a call, between the line that uses a tensor and `__torch_dispatch__`."""


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _TRANSPARENT:
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_frame() -> FrameType | None:
    return next((frame for frame in _frames() if not is_library_file(frame.f_code.co_filename)), None)


def where_of(frame: FrameType) -> str:
    return line_of(frame.f_code.co_filename, frame.f_lineno)


def line_of(file: str, line: int) -> str:
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"
