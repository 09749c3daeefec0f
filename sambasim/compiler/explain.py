"""Why a step could not be captured, in words that a user can act on: what, which line, and how to write it instead.

First the tracer's own error becomes a CaptureError (`tracer_error`). Then the model runs once in PyTorch
(`explained`): what PyTorch itself refuses is told in its words, and what a graph cannot hold is told all at once.
"""

import re
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from sambasim.compiler.step import (
    TrainingStep,
    check_loss,
    forward_line,
    is_library_file,
    loss_in,
    run_eagerly,
    user_line,
)
from sambasim.compiler.watch import BRANCH, CONSTANT, NUMBER, PACKED, SHAPE, Finding, Obstacle, Watch, lost_effects
from sambasim.errors import CaptureError, UserError

_CHECKPOINTING = Obstacle("activation checkpointing", "call the block itself, without torch.utils.checkpoint")
_VALUE = Obstacle(
    "Python code that depends on the value of a tensor", "compute with tensors only: torch.where, torch.rand"
)
_KNOWN = (
    (("pack_padded_sequence", "PackedSequence"), PACKED),
    (("tag_activation_checkpoint", "_checkpoint_context_fn"), _CHECKPOINTING),
    (("data-dependent branching", "Data-dependent branching"), BRANCH),
    (("Tensor.item()", "_local_scalar_dense", ".tolist()", "Tensor.tolist"), NUMBER),
    (("data-dependent expression", "GuardOnDataDependent"), _VALUE),
    (("is mutated in the forward",), CONSTANT),
    (("nonzero", "dynamic shape", "Dynamic shape", "DynamicOutputShape", "masked_select", "unbacked"), SHAPE),
)
"""Marks in what a tracer says, and what they stand for; the first row that fits."""

_MOST_FINDINGS = 6
_LONGEST_LINE = 160


def explained(error: CaptureError, step: nn.Module, inputs: Sequence[Tensor], loss: str | None) -> UserError:
    """The best that can be said of a capture of `step` that failed with `error`.

    `step` is set to train or to evaluate, as it was captured; in training its first output is the loss, called `loss`
    if it has a name. The model and the inputs are left as they are. Raises ModelError if PyTorch cannot run it either.
    """
    copies = [tensor.clone() for tensor in inputs]
    watch = Watch(step, copies)
    outputs = run_eagerly(step, copies, watch)
    if step.training:
        check_loss(loss_in(outputs), loss, any_shape=isinstance(step, TrainingStep) and step.any_loss)
        with suppress(Exception), watch:  # a backward of the user's own may hold obstacles too
            wanted = [parameter for parameter in step.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss_in(outputs).sum(), wanted, allow_unused=True)
    if watch.findings:
        return _told_together(watch.findings, step.training)
    error.where = error.where or _forward_of(step)
    return error


def _forward_of(step: nn.Module) -> str | None:
    """The line at which the `forward` of the user's own model begins."""
    line = forward_line(step.get_submodule("model"))
    return None if line is None or is_library_file(line) else line


def refuse_lost_effects(step: nn.Module, inputs: Sequence[Tensor], *, fake: bool = True) -> bool:
    """Whether a call of `step` on `inputs`, on fake tensors unless `fake` is False, went through to its end.

    `step` is set to train or to evaluate, as it will be captured. Raises CaptureError if a capture would lose
    something that the call does.
    """
    findings = lost_effects(step, inputs, fake=fake)
    if findings:
        raise _told_together(findings, step.training)
    return findings is not None


def tracer_error(what: str, error: BaseException) -> CaptureError:
    """What the tracer raised while it captured `what`, with the user's line where it names one."""
    text = f"{type(error).__name__}: {error}"
    known = next((obstacle for marks, obstacle in _KNOWN if any(mark in text for mark in marks)), None)
    return CaptureError(
        f"the {what} cannot be captured: {known.what if known else _explanation(error)}",
        where=_location(error),
        remedy=known.rewrite if known else _hint(error),
    )


def _told_together(findings: Sequence[Finding], training: bool) -> CaptureError:
    what = f"the {'training step' if training else 'evaluation graph'} cannot be captured"
    if len(findings) == 1:
        finding = findings[0]
        return CaptureError(f"{what}: {finding.obstacle.what}", where=finding.where, remedy=finding.obstacle.rewrite)
    lines = [f"{finding.where}   ({finding.obstacle.what})" for finding in findings[:_MOST_FINDINGS]]
    if len(findings) > _MOST_FINDINGS:
        lines.append(f"and {len(findings) - _MOST_FINDINGS} more lines")
    rewrites = dict.fromkeys(finding.obstacle.rewrite for finding in findings)
    return CaptureError(
        "\n    ".join((f"{what}, for {len(findings)} reasons:", *lines)), remedy="\n         ".join(rewrites)
    )


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def _location(error: BaseException) -> str | None:
    """The user's line: from the message, where strict export puts it, or from the traceback."""
    frames = [match for match in _FRAME.finditer(str(error)) if not is_library_file(match["file"])]
    if frames:
        last = frames[-1]
        return f"{last['file']}:{last['line']}: {last['code'].strip()}"
    return user_line(error)


_END_OF_EXPLANATION = re.compile(
    r"\n\s*(?:Explanation:|Hint:|Developer debug context|For more |from user code|The error above|While executing)"
)


def _explanation(error: BaseException) -> str:
    """The first line of torch's message, and its explanation where it has one: no hints, links and frames."""
    text = str(error).strip()
    first = _END_OF_EXPLANATION.split(text)[0].strip().splitlines()
    told = [*first[:1], *re.findall(r"\n\s*Explanation: (.+)", text)[:1]]
    lines = [line for line in map(_without_advice, told) if line] or [f"PyTorch raises {type(error).__name__}"]
    return "\n    ".join(line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…" for line in lines)


_OTHER_ADVICE = re.compile(
    r"https?://|www\.|pytorch\.org|github|\b(issue|bug)s?\b|please report|torch\._dynamo|torch\.compile|TORCH_?LOGS|"
    r"TORCH\w*=|compiled? (region|code)|graph break|find(ing)? a workaround",
    re.IGNORECASE,
)
"""What torch advises its own users of torch.compile: to write to PyTorch's authors, to set its options."""


def _without_advice(text: str) -> str:
    """The sentences of `text` that are no `_OTHER_ADVICE`, in words that do not name torch's tracer."""
    sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"\b(Torch)?Dynamo\b", "PyTorch's tracer", text.strip()))
    return " ".join(sentence for sentence in sentences if not _OTHER_ADVICE.search(sentence))


def _hint(error: BaseException) -> str:
    hints: list[str] = [hint.strip() for hint in re.findall(r"Hint: (.+)", str(error))]
    sensible = [hint for hint in hints if 0 < len(hint) <= _LONGEST_LINE and not _OTHER_ADVICE.search(hint)]
    return _without_advice(sensible[0]) if sensible else "rewrite the line with PyTorch's own operators on tensors"
