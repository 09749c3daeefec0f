"""Why a step cannot be captured: which lines, and how to write them instead."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sambasim.compiler.names import forward_line, is_library_file, line_in, user_line
from sambasim.compiler.recording import Op, Recording
from sambasim.errors import CaptureError


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
UNREGISTERED = Obstacle(
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
    ((".numpy() is not supported",), _NUMPY),
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


def explained(error: CaptureError, step: nn.Module, call: Recording) -> CaptureError:
    """The most helpful error for a capture of `step` that failed with `error`, of which `call` was an eager call."""
    findings = obstacles(call)
    if findings:
        return all_findings(findings, step.training)
    line = forward_line(step.get_submodule("model"))
    error.where = error.where or (None if line is None or is_library_file(line) else line)
    return error


def obstacles(call: Recording) -> Sequence[Finding]:
    """What of an eager call cannot be captured, in the order of execution."""
    found = ((_obstacle(op), op.line) for op in call.ops if op.line is not None)
    return list(dict.fromkeys(Finding(obstacle, str(line)) for obstacle, line in found if obstacle is not None))


def changed_constants(call: Recording) -> Sequence[Finding]:
    """The lines at which a call changes tensors that are none of the model's, which later calls may read."""
    return [finding for finding in obstacles(call) if finding.obstacle is CHANGED_CONSTANT]


def _obstacle(op: Op) -> Obstacle | None:
    name, line = op.func._schema.name, op.line
    if name == "aten::_pack_padded_sequence":
        return _PACKED
    if name == "aten::_ctc_loss":
        return _LENGTHS
    if name == "aten::index":  # by numbers its shape is known, by a mask it is not
        return SHAPE if op.masks else None
    if torch.Tag.dynamic_output_shape in op.func.tags:
        return SHAPE
    if torch.Tag.data_dependent_output in op.func.tags:
        # Tracers know where torch's own code reads values, and how to leave out an assertion.
        if line is None or not line.is_next or str(line).partition(": ")[2].startswith("assert"):
            return None
        return _BRANCH if line.jumps else _NUMBER
    if op.foreign:
        return UNREGISTERED
    kinds = {label.partition(" ")[0] for label in op.writes}
    if "input" in kinds:
        return _INPUT
    return _PARAMETER if "parameter" in kinds else CHANGED_CONSTANT if kinds - {"buffer"} else None


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
