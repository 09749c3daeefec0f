"""A compile request, and a digest of what it compiles, by which a run sees that its model is still the compiled one:
another capture would take every replica seconds. In any doubt there is no digest, and the model is captured."""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType

import torch
from torch import Tensor, nn

from sambasim import __version__
from sambasim.compiler.capture.recording import Recording, digest_of
from sambasim.compiler.capture.step import EvaluationStep, Example, Losses, TrainingStep
from sambasim.compiler.capture.tensors import STORED, held_by, inputs_in, stored_in
from sambasim.compiler.capture.trial import buffers_of_plain_tensors, trial, with_values
from sambasim.compiler.update import Update
from sambasim.errors import CaptureError
from sambasim.options.compile import CompileOptions
from sambasim.pef.digests import code_digest
from sambasim.samba.inputs import losses_among, named_loss
from sambasim.whose_code import is_ours, is_users_file

_MOST_BYTES = 256 << 20
"""The most that a call may make. Where it makes more, a capture takes little time beside the steps."""


@dataclass(frozen=True, slots=True)
class Request:
    """A model with one batch of plain tensors by name, and how it is compiled."""

    model: nn.Module
    example: Example
    updates: tuple[Update, ...]
    options: CompileOptions
    loss_indices: tuple[int, ...] = ()

    @property
    def losses(self) -> Losses:
        return partial(losses_among, given=self.loss_indices, named=named_loss(self.model))


def fingerprint(asked: Request) -> str | None:
    """64 letters that are equal only for what compiles alike; without `updates`, of the forward in evaluation mode.
    Weights and inputs may differ; other constants may not. Returns None where the operators do not show all that the
    model does. The model and the random generators are left as they are."""
    model, updates, dtype = asked.model, asked.updates, asked.options.dtype
    if sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad) > _MOST_BYTES:
        return None
    stored = STORED[dtype]
    given = inputs_in(stored, asked.example.inputs)
    example = asked.example._replace(inputs=given)
    step: nn.Module = TrainingStep(model, example, None, asked.losses)
    if not updates:
        step = EvaluationStep(model, example, None)
    try:
        with trial(step), buffers_of_plain_tensors(model), stored_in(stored, model):
            held = _held(model)
            tensors = [tensor.clone() for tensor in given.values()]
            named = {f"input {name}": tensor for name, tensor in zip(given, tensors, strict=True)}
            recording = Recording({str(paths): tensor for tensor, paths in held.values()} | named)
            facts = [*_tensors(model, held)]
            code: set[str] = set()
            try:
                with torch.set_grad_enabled(bool(updates)), _guarded(code), recording:
                    results = _forward_and_backward(step, tensors) if updates else step.eval()(*tensors)
                ends = [None if tensor is None else recording.form(tensor) for tensor in results]
            finally:
                recording.undo()
            # Values may decide nothing, numbers come from the default generator, and only buffers may change.
            buffers = {str(paths) for tensor, paths in held.values() if not isinstance(tensor, nn.Parameter)}
            tells_all = not any(op.asks or op.draws_from or not buffers >= set(op.writes) for op in recording.ops)
            if recording.seeded or recording.made_bytes > _MOST_BYTES or not tells_all:
                return None
        facts += (
            f"sambasim {__version__}, torch {torch.__version__}, Python {sys.version_info[:2]}",
            f"{type(model).__name__}, {dtype}, {example.by_keyword}",
            *(f"input {name} {_form(tensor)}" for name, tensor in given.items()),
            *_described(updates),
            *(op.text for op in recording.ops),
            f"gives {ends}",
            *sorted(code),
        )
    except (Exception, SystemExit):
        return None
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _forward_and_backward(step: nn.Module, tensors: Sequence[Tensor]) -> Iterable[Tensor | None]:
    """The outputs, then the gradients of the trained parameters."""
    if not step.get_submodule("model").training:
        step.train()
    outputs = step(*tensors)
    wanted = [parameter for parameter in step.parameters() if parameter.requires_grad]
    losses = [output for output in outputs if output.requires_grad] or [outputs[0]]
    gradients = torch.autograd.grad([loss.sum() for loss in losses], wanted, allow_unused=True)
    return (*outputs, *gradients)


def _held(model: nn.Module) -> dict[int, tuple[Tensor, list[str]]]:
    """Every tensor that a module of `model` holds, with its paths, by its id: parameters, buffers, plain attributes,
    and those in lists and dictionaries."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        attributes = {**vars(module), **module._parameters, **module._buffers}
        for name, value in attributes.items():
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for where, tensor in ((f"{path}.{name}", value), *((f"{path}.{name}[{key}]", item) for key, item in items)):
                if isinstance(tensor, Tensor) and name not in ("_parameters", "_buffers"):
                    found.setdefault(id(tensor), (tensor, []))[1].append(where)
    return found


def _tensors(model: nn.Module, held: Mapping[int, tuple[Tensor, list[str]]]) -> Iterator[str]:
    """A line for each tensor of `model`: its paths and names, its memory, and the bytes of what has no name."""
    names = {id(one.tensor): one.names for one in held_by(model)}
    memories: dict[int, int] = {}
    for tensor, paths in held.values():
        memory = memories.setdefault(tensor.untyped_storage()._cdata, len(memories))
        own = names.get(id(tensor), ())
        content = _form(tensor) + ("" if own else digest_of(tensor))
        trained = isinstance(tensor, nn.Parameter), tensor.requires_grad
        yield f"{paths} {content} {trained} {own} {memory} {tensor.storage_offset()}"


def _described(updates: Sequence[Update]) -> Iterator[str]:
    for update in updates:
        names = None if update.parameters is None else sorted(update.parameters)
        yield f"{update.kind} {update.states} {sorted(update.hyperparameters)} {names}"
    # Different bounds are an error, which a capture finds.
    yield f"{len({update.hyperparameters.get('max_grad_norm') for update in updates}) <= 1}"


_TO_PYTHON = ("numpy", "__array__", "tolist", "__dlpack__", "__deepcopy__", "__reduce_ex__")
"""Methods of a tensor that give its values to Python, where no operator shows what becomes of them."""

_IMPORTING = "<frozen importlib._bootstrap>", "_find_and_load"
_IS_CAPTURED = frozenset(
    function.__code__
    for function in (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting)
)
"""The functions by which a model can ask whether it is being captured."""


@contextlib.contextmanager
def _guarded(code: set[str]) -> Iterator[None]:
    """Add the digests of the user's code that runs here to `code`. Raises CaptureError where values go to Python, and
    where the model asks whether it is captured."""
    importing, asks_for_capture = 0, False

    def guarded(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **kwargs: object) -> object:
            if not is_ours(sys._getframe(1).f_code.co_filename):
                raise CaptureError(f"{name} gives values to Python")
            return method(*args, **kwargs)

        return called

    def profile(frame: FrameType, event: str, argument: object) -> None:
        """Called for each call and return. An import runs code too, but only in the first call of all."""
        nonlocal importing, asks_for_capture
        called = frame.f_code
        asker = frame.f_back if event == "call" and called in _IS_CAPTURED else None
        if asker is not None and is_users_file(asker.f_code.co_filename):
            asks_for_capture = True  # Python would ignore an exception here
        if (called.co_filename, called.co_name) == _IMPORTING:
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and is_users_file(called.co_filename):
            code.add(code_digest(called))

    with contextlib.ExitStack() as stack:
        methods = ((Tensor, name, guarded(name, getattr(Tensor, name))) for name in _TO_PYTHON)
        stack.enter_context(with_values(methods))
        stack.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(profile)
        yield
    if asks_for_capture:
        raise CaptureError("a capture takes another path than a call")


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
