"""Why a step cannot be captured: which lines, and how to write them instead; and what is told of state that a graph
loses. Each remedy is applied by a test."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from sambasim.compiler.capture.recording import Op, Recording, forward_line, is_bug
from sambasim.data.user_code import user_line
from sambasim.errors import CaptureError, SambasimError
from sambasim.units import first_of


@dataclass(frozen=True, slots=True)
class Obstacle:
    what: str
    rewrite: str


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An obstacle in the model. `inside`: the line of a library that the line at `where` calls, which is it."""

    obstacle: Obstacle
    where: str
    inside: str = ""


COUNTED = (
    "take the steps of the run, def forward(self, x, step), and choose by tensors: torch.where(step < 10, a, b); or "
    'count in a buffer, self.register_buffer("steps", torch.zeros(())), by self.steps.add_(1), and choose by tensors: '
    "torch.where(self.steps < 10, a, b)"
)
_COPIED = 'keep it in a buffer, self.register_buffer("last", torch.zeros(size)), and copy into it: self.last.copy_(…)'
REWRITES = {
    "value": COUNTED,
    "tensor": _COPIED,
    "content": f"in place of a length, {COUNTED}; keep values in another one, self.last.copy_(…)",
    "gradient": "choose by a count in a buffer: w = torch.where(self.steps < n, self.a.weight.detach(), self.a.weight)",
    "position": "draw random numbers by PyTorch, torch.rand(()); keep other values in a buffer",
}
FIRST_CALL = (
    "compute it before, in __init__; or keep the value and a flag in buffers, and choose by "
    "torch.where(self.is_set, self.value, …)"
)
INTO_MODEL = "make the loss a submodule of the model, whose forward(x, target) returns it first; there"
KEPT = "changed by each call of the model, read by no later one, and so not in the PEF: {}"
FOREIGN = (
    "forward() uses {}; what is no submodule or parameter of the model does not train, and is a constant of the PEF"
)
OPENED = "opened by the model: {}; what it reads in files is as for the example batch in every step of a run"
DONE = "done by forward(), and not by a run: {}"
EVALUATED = "changed by forward() in evaluation too, and not by the evaluations of a run: {}"

RATES = "give a schedule, training.schedule; or train in several runs, each with its own rate, and resume"
_DRAWN = "draw the numbers once, and keep them in a buffer: self.register_buffer(name, torch.randn(…))"
SEEDED = Obstacle("a seed or a state of the generator of random numbers, which a graph does not set", _DRAWN)
MADE = Obstacle("a torch.Generator that forward() makes", _DRAWN)

# fmt: off
_BRANCH = Obstacle("a branch on the value of a tensor",
    "compute both sides, and choose: torch.where(condition, a, b); min and max are torch.minimum(a, b), torch.clamp")
_NUMBER = Obstacle("the value of a tensor as a Python number",
    "keep it a tensor, which is logged as it is: leave out .item(), float(), .tolist(); where it decides, "
    "torch.where(condition, a, b)")
SHAPE = Obstacle("a shape that depends on the values of a tensor",
    "keep every element: torch.where(mask, a, b), or a mask to multiply by, instead of a selection")
DIFFERS = Obstacle("a value that differs from call to call, though nothing that the model can reach has changed",
    "give it to the model as an input, or compute it before")
GENERATOR = Obstacle("a torch.Generator of its own, whose state a graph does not keep",
    "leave out generator=, which draws from torch's")

_ASKING = (
    (r"^(one_hot/2| )|_ctc_loss\.Tensor", None),  # values that are only checked, or known to a capture
    (r"^one_hot/", Obstacle("one_hot() without a number of classes", "give it: F.one_hot(i, num_classes=…)")),
    (r"^bincount/", Obstacle("bincount(), whose size depends on values",
        "count by a sum: F.one_hot(i, num_classes=…).sum(0)")),
    (r"^repeat_interleave/", Obstacle("repeat_interleave() by counts that are values of a tensor",
        "take a fixed number of rows: x.index_select(0, (torch.arange(n)[:, None] >= counts.cumsum(0)).sum(1))")),
    (r"^(feature_)?(alpha_)?dropout\d?d?/", Obstacle("a dropout rate that is the value of a tensor",
        "draw it: x * (torch.rand_like(x) >= p) / (1 - p)")),
    (r"^(__bool__|is_nonzero|equal|allclose)/", _BRANCH),
    (r"^__int__/", Obstacle("the value of a tensor as a whole number",
        "keep it a tensor: leave out int(); where it decides, torch.where(condition, a, b); "
        "to write at a position, a.index_copy_(0, (t + torch.arange(n)) % len(a), b)")),
    (r"^(item|tolist|__float__|__complex__)/", _NUMBER),
    (r"_pack_padded_sequence", Obstacle("a packed sequence, whose shape depends on lengths",
        "run the recurrent layer on the padded batch, and mask its outputs: outputs * mask.unsqueeze(-1)")),
    (r"_ctc_loss", Obstacle("ctc_loss() with lengths that are numbers",
        "give both as tensors: torch.full((batch,), n)")),
    (r"^__[gs]etitem__/.*_local_scalar_dense.* aten\.select\b", Obstacle("an index that is the value of a tensor",
        "select by the tensor: a.index_select(0, t.view(1))[0]")),
    (r"_local_scalar_dense", Obstacle("a size that is the value of a tensor",
        "take the largest size that it may have, and a mask: torch.where(torch.arange(size) < n, a, b)")),
    (r"", SHAPE),
)
"""Of operators that ask for values, `FUNCTION/ARGUMENTS OPERATOR NEXT`, and their obstacle; the first row that fits."""

_CHANGING = (
    (r"embedding_renorm_", Obstacle("max_norm of an embedding, which changes its weight in place",
        "leave out max_norm, and renorm a copy of the weight, which trains other numbers: "
        "F.embedding(i, torch.renorm(self.embedding.weight, 2, 0, max_norm))")),
    (r"\| recomputed ", Obstacle(
        "a buffer that is changed twice a step: in the forward, and as torch.utils.checkpoint computes it again",
        "call the block without torch.utils.checkpoint, which changes it once; the option recompute saves the memory")),
    (r"\| late ", Obstacle("a tensor that a hook or another function of the backward changes in place",
        "compute with the gradient alone, which trains other numbers: return g / (1 + g.norm())")),
    (r"\| input ", Obstacle("an input that is changed in place",
        "make a new tensor: x = x * 2 instead of x.mul_(2) or x *= 2")),
    (r"\| (foreign )?parameter ", Obstacle("a trained parameter that is changed in place",
        "freeze it, requires_grad_(False), if no gradient is to train it; else take a changed copy, "
        "w = self.weight.clamp(-1, 1), which trains other numbers")),
    (r"\| foreign buffer ", Obstacle("a buffer or frozen parameter that is changed, and is none of the model's",
        "give its module to the model: as an attribute, in an nn.ModuleList for a list, in an nn.ModuleDict for a "
        "dict")),
    (r"\| (?!buffer )", Obstacle("a tensor that is changed in place, and is no buffer of the model",
        "register it: self.register_buffer(name, tensor)")),
)
"""Of operators that change tensors which existed before, `OPERATOR| TENSOR`."""

_RAISED = (
    (r"\.numpy\(\) is not supported", Obstacle("NumPy, which a graph does not call",
        "write it with PyTorch: torch.tanh(x), not np.tanh(x.numpy())")),
    (r"DispatchKey\.Sparse", Obstacle("a sparse tensor, where a PEF has dense ones", "make it dense: .to_dense()")),
    (r"only change requires_grad flags of leaf", Obstacle("requires_grad that is changed in forward()",
        "call it with detached weights: "
        "torch.func.functional_call(layer, {name: w.detach() for name, w in layer.named_parameters()}, x)")),
    (r"data-dependent expression|GuardOnDataDependent", _BRANCH),
    (r"_local_scalar_dense|\.tolist\(\)", _NUMBER),
    (r"DynamicOutputShape|unbacked", SHAPE),
)
"""Of what a tracer raises."""
# fmt: on

_ADVICE = re.compile(r"https?:|github|\b(issue|bug)s?\b|please report|torch\._?dynamo|torch\.compile|TORCH_", re.I)
_MOST = 6  # lines of an error, or names of a notice


def _first(rows: Iterable[tuple[str, Obstacle | None]], text: str) -> Obstacle | None:
    return next((obstacle for pattern, obstacle in rows if re.search(pattern, text)), None)


@contextmanager
def raised(what: str, model: nn.Module | None = None) -> Iterator[None]:
    """What torch raises while it captures `what` becomes a CaptureError, with the user's line that it went through, or
    `forward` of `model`. Errors and bugs of sambasim, and where memory ends, stay as they are."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (SambasimError, MemoryError)) or is_bug(error):
            raise
        sentences = re.split(r"(?<=[.!?])\s+", str(error).strip().partition("\n")[0])
        said = " ".join(sentence for sentence in sentences if sentence and not _ADVICE.search(sentence))[:160]
        what_else = said or f"PyTorch raises {type(error).__name__}"
        unknown = Obstacle(what_else, "rewrite the line with PyTorch's own operators on tensors")
        why = _first(_RAISED, f"{type(error).__name__}: {error}") or unknown
        where = user_line(error) or (None if model is None else forward_line(model))
        raise CaptureError(f"the {what} cannot be captured: {why.what}", where=where, remedy=why.rewrite) from error


def explained(error: CaptureError, step: nn.Module, call: Recording) -> CaptureError:
    """The most helpful error for a capture of `step` that failed with `error`, of which `call` was an eager call."""
    error.where = error.where or forward_line(step.get_submodule("model"))
    occurrences = obstacles(call)
    return all_occurrences(occurrences, step.training) if occurrences else error


def obstacles(call: Recording) -> Sequence[Occurrence]:
    """What of an eager call cannot be captured, in the order of execution."""
    changed = {label for op in call.ops for label in op.writes}
    pairs = zip(call.ops, [*call.ops[1:], None], strict=True)
    return _occurrences((op, _obstacle(op, str(then and then.func), changed)) for op, then in pairs)


def changed_constants(call: Recording) -> Sequence[Occurrence]:
    """The lines at which a call changes tensors that are none of the model's, which later calls may read."""
    own = ("parameter ", "buffer ", "input ")
    changing = (op for op in call.ops if not all(label.startswith(own) for label in op.writes))
    return _occurrences((op, _obstacle(op, "", frozenset())) for op in changing)


def _occurrences(found: Iterable[tuple[Op, Obstacle | None]]) -> Sequence[Occurrence]:
    lines = ((obstacle, op.line) for op, obstacle in found)
    return list(dict.fromkeys(Occurrence(what, str(line), line.inside) for what, line in lines if what and line))


def _obstacle(op: Op, then: str, changed: Set[str]) -> Obstacle | None:
    """`then`: the operator after it; `changed`: the tensors that the call changes."""
    if op.asks and (op.buffers is None or not op.buffers.isdisjoint(changed)):
        return _first(_ASKING, f"{op.function} {op.func} {then}")
    return next(filter(None, (_first(_CHANGING, f"{op.func}| {label}") for label in op.writes)), None)


def _rewrite(occurrence: Occurrence) -> str:
    library = occurrence.inside or (occurrence.where if "-packages" in occurrence.where else "")
    advice = f"{library} is code of a library: choose settings that do not run it; else " if library else ""
    return f"{advice}{occurrence.obstacle.rewrite}"


def all_occurrences(occurrences: Sequence[Occurrence], training: bool) -> CaptureError:
    what = f"the {'training step' if training else 'evaluation graph'} cannot be captured"
    rewrites = "\n         ".join(dict.fromkeys(map(_rewrite, occurrences)))
    if len(occurrences) == 1:
        return CaptureError(f"{what}: {occurrences[0].obstacle.what}", where=occurrences[0].where, remedy=rewrites)
    lines = [f"{occurrence.where}   ({occurrence.obstacle.what})" for occurrence in occurrences[:_MOST]]
    if len(occurrences) > _MOST:
        lines.append(f"and {len(occurrences) - _MOST} more lines")
    return CaptureError("\n    ".join((f"{what}, for {len(occurrences)} reasons:", *lines)), remedy=rewrites)


def notices(told: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Of names of slots, and of what calls do outside of Python, by what is told of them."""
    return tuple(what.format(first_of([*names], _MOST)) for what, names in told.items() if names)
