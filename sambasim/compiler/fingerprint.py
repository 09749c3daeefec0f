"""What a training step does, in 64 letters: a run tells by them that its model is still the one that was compiled.

To capture the model once more would tell it too, but takes every replica seconds; the import of torch's tracers alone
is two. Here the model is called once, and its loss is differentiated. The operators that PyTorch dispatches, with what
each takes and gives, are the step; with the model's tensors and the optimizers they are all that a PEF depends on.

In any doubt there is no fingerprint, or another one, and the model is captured. Fake and meta tensors, which compute
nothing, would not do: they import the tracers.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from sambasim import __version__
from sambasim.compiler.passes.optimizer import Update
from sambasim.compiler.precision import STORED, default_type, inputs_in
from sambasim.compiler.recorder import Recorder, form
from sambasim.compiler.step import EvaluationStep, TrainingStep
from sambasim.compiler.trial import trial

_MOST_BYTES = 256 << 20
"""What a call may make. Where it makes more, a capture takes little time beside the steps."""


def fingerprint(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    updates: Sequence[Update],
    *,
    by_keyword: bool,
    dtype: str,
    loss_indices: tuple[int, ...] = (),
) -> str | None:
    """64 letters that are equal only for what compiles alike. Without `updates` it is the forward in evaluation mode.

    Weights and inputs, comments and the names of variables may differ; masks, tables and other constants may not.
    Returns None for a step that is too large, and where the operators do not tell all that the model does. The model
    and the random generators are left as they are, but for what the model keeps outside of its modules.
    """
    if sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad) > _MOST_BYTES:
        return None
    stored = STORED[dtype]
    given = inputs_in(stored, inputs)
    names = tuple(given)
    step: nn.Module = TrainingStep(model, names, None, by_keyword, any_loss=True, loss_indices=loss_indices)
    if not updates:
        step = EvaluationStep(model, names, None, by_keyword)
    recorder, held = Recorder(_MOST_BYTES), _held(model)

    def convert(tensor: Tensor) -> Tensor:
        label = str(held[id(tensor)][1]) if id(tensor) in held else recorder.content(tensor)
        return recorder.stand_in(tensor, label, stored if tensor.is_floating_point() else None)

    try:
        with trial(step, convert), default_type(stored or torch.get_default_dtype()):
            tensors = [recorder.stand_in(tensor, f"input {name}") for name, tensor in given.items()]
            with torch.set_grad_enabled(bool(updates)), recorder.recorded():
                results = _train(step, tensors) if updates else step.eval()(*tensors)
            ends = [None if tensor is None else recorder.label(tensor) for tensor in results]
        facts = (
            f"sambasim {__version__}, torch {torch.__version__}, Python {sys.version_info[:2]}",
            f"{type(model).__name__}, {dtype}, {by_keyword}",
            *(f"input {name} {form(tensor)}" for name, tensor in given.items()),
            *_tensors(model, held, recorder),
            *_described(updates),
            *recorder.lines,
            f"gives {ends}",
            *sorted(recorder.code),
        )
    except (Exception, SystemExit):
        return None
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _train(step: nn.Module, tensors: Sequence[Tensor]) -> Iterable[Tensor | None]:
    if not step.get_submodule("model").training:
        step.train()
    outputs = step(*tensors)
    wanted = [parameter for parameter in step.parameters() if parameter.requires_grad]
    losses = [output for output in outputs if output.requires_grad] or [outputs[0]]
    gradients = torch.autograd.grad([loss.sum() for loss in losses], wanted, allow_unused=True)
    return (*outputs, *gradients)


def _held(model: nn.Module) -> dict[int, tuple[Tensor, list[str]]]:
    """Every tensor that a module of `model` holds, with its paths, by its id: parameters, buffers, plain attributes,
    and what is in lists and dictionaries of them."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        attributes = {**vars(module), **module._parameters, **module._buffers}
        for name, value in attributes.items():
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for where, tensor in ((f"{path}.{name}", value), *((f"{path}.{name}[{key}]", item) for key, item in items)):
                if isinstance(tensor, Tensor) and name not in ("_parameters", "_buffers"):
                    found.setdefault(id(tensor), (tensor, []))[1].append(where)
    return found


def _tensors(model: nn.Module, held: Mapping[int, tuple[Tensor, list[str]]], recorder: Recorder) -> Iterator[str]:
    """A line for each tensor of `model`: where it is, and which memory it is in. What no state_dict holds is a
    constant, and told by its bytes."""
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    memories: dict[int, int] = {}
    for tensor, paths in held.values():
        memory = memories.setdefault(tensor.untyped_storage()._cdata, len(memories))
        content = form(tensor) if id(tensor) in kept else recorder.content(tensor)
        trained = isinstance(tensor, nn.Parameter), tensor.requires_grad
        yield f"{paths} {content} {trained} {id(tensor) in kept} {memory} {tensor.storage_offset()}"


def _described(updates: Sequence[Update]) -> Iterator[str]:
    for update in updates:
        names = None if update.parameters is None else sorted(update.parameters)
        yield f"{update.kind} {update.states} {sorted(update.hyperparameters)} {names}"
    # Different bounds are an error, which a capture finds.
    yield f"{len({update.hyperparameters.get('max_grad_norm') for update in updates}) <= 1}"
