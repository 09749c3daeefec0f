"""What a training step does, in 64 letters: a run tells by them that its model is still the one that was compiled.

To capture the model once more would tell it too, but takes every replica seconds; the import of torch's tracers alone
is two. Here the model is called once with zeros for its weights and inputs, and its loss is differentiated. The
operators that PyTorch dispatches, with what each takes and gives, are the step; with the model's tensors and the
optimizers they are all that a capture depends on.

Meta tensors, which compute nothing, would not do: their operators import the tracers.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sambasim import __version__
from sambasim.compiler.passes.optimizer import Update
from sambasim.compiler.precision import STORED, default_type, inputs_in
from sambasim.compiler.step import EvaluationStep, TrainingStep
from sambasim.compiler.trial import trial
from sambasim.pef.weights import bytes_of

_MOST_BYTES = 256 << 20
"""What the operators of a call may give together. Where they give more, a capture takes little beside a step."""


def fingerprint(
    model: nn.Module, inputs: Mapping[str, Tensor], updates: Sequence[Update], *, by_keyword: bool, dtype: str
) -> str | None:
    """64 letters that are equal for what compiles alike. Without `updates` it is the forward in evaluation mode.

    Names of modules without tensors, and the weights, may differ; tables, masks and other constants may not.
    Returns None for a step that is too large, and where the call does not go through on zeros, which says nothing of
    the model. The model and the random generators are left as they are.
    """
    stored = STORED[dtype]
    inputs = inputs_in(stored, inputs)
    names = tuple(inputs)
    step: nn.Module = TrainingStep(model, names, None, by_keyword, any_loss=True)
    if not updates:
        step = EvaluationStep(model, names, None, by_keyword)
    recorder = _Recorder(_labels(model))

    def convert(tensor: Tensor) -> Tensor:
        wanted = tensor.dtype if stored is None or not tensor.is_floating_point() else stored
        return recorder.stand_in(tensor, wanted)

    try:
        with trial(step, convert), default_type(stored or torch.get_default_dtype()):
            given = [recorder.stand_in(tensor, tensor.dtype, f"input {name}") for name, tensor in inputs.items()]
            with recorder, torch.set_grad_enabled(bool(updates)):
                results = _train(step, given) if updates else step.eval()(*given)
            ends = [recorder.label(tensor) for tensor in results]
        facts = (
            f"sambasim {__version__}, torch {torch.__version__}, {type(model).__name__}, {dtype}, {by_keyword}",
            *(f"input {name} {_form(tensor)}" for name, tensor in inputs.items()),
            *_tensors(model),
            *(_described(update) for update in updates),
            *recorder.lines,
            f"gives {ends}",
        )
    except (Exception, SystemExit):
        return None
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _train(step: nn.Module, given: Sequence[Tensor]) -> Iterable[Tensor | None]:
    if not step.get_submodule("model").training:
        step.train()
    outputs = step(*given)
    wanted = [parameter for parameter in step.parameters() if parameter.requires_grad]
    return (*outputs, *torch.autograd.grad(outputs[0].sum(), wanted, allow_unused=True))


def _labels(model: nn.Module) -> dict[int, str]:
    """The first path of each parameter and buffer of `model`, by the tensor's id."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {id(tensor): f"tensor {path}" for path, tensor in reversed(named)}


def _tensors(model: nn.Module) -> Iterator[str]:
    """A line for each path of each tensor of `model`; what no state_dict holds is a constant, and told by its bytes."""
    labels, kept = _labels(model), set(model.state_dict(keep_vars=True))
    for path, parameter in model.named_parameters(remove_duplicate=False):
        yield f"parameter {path}: {labels[id(parameter)]} {_form(parameter)} {parameter.requires_grad}"
    for path, buffer in model.named_buffers(remove_duplicate=False):
        content = "" if path in kept else _content(buffer)
        yield f"buffer {path}: {labels[id(buffer)]} {_form(buffer)} {path in kept} {content}"


def _described(update: Update) -> str:
    names = None if update.parameters is None else sorted(update.parameters)
    return f"{update.kind} {update.states} {sorted(update.hyperparameters)} {names}"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _content(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own methods are untyped here and below
    """Writes a line for each operator. A tensor goes by its label: that of the model's tensor, of the input or of the
    result that it is, or of its bytes, if a line of the model's source made it."""

    def __init__(self, labels: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.lines: list[str] = []
        self._labels_of_model = labels
        self._label_of: dict[tuple[object, ...], str] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the place of one that is gone
        self._bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What torch asks; its answer would import a tracer, in seconds, to keep it from tracing this class."""
        return False

    def stand_in(self, tensor: Tensor, dtype: torch.dtype, label: str | None = None) -> Tensor:
        """Zeros in place of `tensor`."""
        label = label or self._labels_of_model.get(id(tensor)) or f"{_form(tensor)} {_content(tensor)}"
        zeros = torch.zeros(tensor.shape, dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            zeros = nn.Parameter(zeros, tensor.requires_grad)
        self._know(zeros, label)
        self._bytes = 0  # zeros that nobody writes to take no memory
        return zeros

    def label(self, tensor: Tensor | None) -> str | None:
        """The label of `tensor`."""
        if tensor is None:
            return None
        place = _place(tensor)
        if place not in self._label_of:
            self._know(tensor, f"{_form(tensor)} {_content(tensor)}")
        return self._label_of[place]

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        told = tree_map_only(Tensor, self.label, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        results: list[str] = []
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._know(tensor, f"%{len(self.lines)}.{len(results)}")
                results.append(f"{self.label(tensor)} {_form(tensor)}")
        self.lines.append(f"{func} {told} -> {results}")
        return result

    def _know(self, tensor: Tensor, label: str) -> None:
        place = _place(tensor)
        if place in self._label_of:
            return
        self._label_of[place] = label
        self._alive.append(tensor)
        self._bytes += tensor.nbytes
        if self._bytes > _MOST_BYTES:
            raise MemoryError("the step is too large to be run beside its model")


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for the same part of the same memory, whichever object it is in."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
