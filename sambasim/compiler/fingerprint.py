"""A digest of what a training step does, by which a run sees that its model is still the compiled one: another capture
would take every replica seconds. In any doubt there is no digest, and the model is captured."""

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sambasim
from sambasim import __version__
from sambasim.compiler.names import is_library_file
from sambasim.compiler.precision import STORED, default_type, inputs_in
from sambasim.compiler.step import EvaluationStep, TrainingStep
from sambasim.compiler.trial import replaced, trial, written
from sambasim.compiler.update import Update
from sambasim.pef.sources import code_digest
from sambasim.pef.weights import bytes_of

_MOST_BYTES = 256 << 20
"""The most that a call may make. Where it makes more, a capture takes little time beside the steps."""


def fingerprint(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    updates: Sequence[Update],
    *,
    by_keyword: bool,
    dtype: str,
    loss_indices: tuple[int, ...] = (),
) -> str | None:
    """64 letters that are equal only for what compiles alike; without `updates`, of the forward in evaluation mode.
    Weights and inputs may differ; other constants may not. Returns None where the operators do not show all that the
    model does. The model and the random generators are left as they are."""
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
        return recorder.substitute(tensor, label, stored if tensor.is_floating_point() else None)

    try:
        with trial(step, convert), default_type(stored or torch.get_default_dtype()):
            tensors = [recorder.substitute(tensor, f"input {name}") for name, tensor in given.items()]
            with torch.set_grad_enabled(bool(updates)), recorder.recorded():
                results = _forward_and_backward(step, tensors) if updates else step.eval()(*tensors)
            ends = [None if tensor is None else recorder.label(tensor) for tensor in results]
        facts = (
            f"sambasim {__version__}, torch {torch.__version__}, Python {sys.version_info[:2]}",
            f"{type(model).__name__}, {dtype}, {by_keyword}",
            *(f"input {name} {_form(tensor)}" for name, tensor in given.items()),
            *_tensors(model, held, recorder),
            *_described(updates),
            *recorder.lines,
            f"gives {ends}",
            *sorted(recorder.code),
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


def _tensors(model: nn.Module, held: Mapping[int, tuple[Tensor, list[str]]], recorder: "Recorder") -> Iterator[str]:
    """A line for each tensor of `model`: its paths, its memory, and the bytes of what no state_dict holds."""
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    memories: dict[int, int] = {}
    for tensor, paths in held.values():
        memory = memories.setdefault(tensor.untyped_storage()._cdata, len(memories))
        content = _form(tensor) if id(tensor) in kept else recorder.content(tensor)
        trained = isinstance(tensor, nn.Parameter), tensor.requires_grad
        yield f"{paths} {content} {trained} {id(tensor) in kept} {memory} {tensor.storage_offset()}"


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

_RUNNING = ("running_mean", "running_var")
"""Arguments that batch_norm writes to, though its schema does not say so."""

_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))

_SAMBA = f"{Path(sambasim.__file__).parent / 'samba'}/"
"""The first call of `samba.cat` runs other code than later ones; its operators show what is computed."""


class NotRecordable(Exception):
    """The call does something that its operators do not show."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own methods are untyped here and below
    """Records the operators and the user's code of a call. A tensor goes by the label of what it is, or by its bytes.
    Raises NotRecordable where values decide what is done, where something is changed that the call has not made, and
    where it makes more than `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.lines: list[str] = []
        self.code: set[str] = set()
        self._bytes_left = most_bytes
        self._label_of: dict[tuple[object, ...], str] = {}
        self._is_own: dict[int, bool] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the memory of one that is gone
        self._reading = False
        self._importing = 0
        self._asks_for_capture = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks this; its own answer would import a tracer, in seconds, to keep it from tracing this class."""
        return False

    def substitute(self, tensor: Tensor, label: str, dtype: torch.dtype | None = None) -> Tensor:
        """What the call gets for `tensor`, in `dtype` if one is given: a parameter in its own memory, which must not be
        changed, and a copy of anything else."""
        given = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        if isinstance(tensor, nn.Parameter):
            given = nn.Parameter(given, tensor.requires_grad)
        else:
            given = given.clone().requires_grad_(tensor.requires_grad)
        self._know(given, label, own=not isinstance(tensor, nn.Parameter))
        return given

    def label(self, tensor: Tensor) -> str:
        place = _place(tensor)
        if place not in self._label_of:
            self._know(tensor, self.content(tensor), own=False)
        return self._label_of[place]

    def content(self, tensor: Tensor) -> str:
        self._reading = True
        try:
            return f"{_form(tensor)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
        finally:
            self._reading = False

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in _TO_PYTHON:
                stack.enter_context(replaced(Tensor, name, self._guarded(name, getattr(Tensor, name))))
            stack.callback(sys.setprofile, sys.getprofile())
            stack.enter_context(self)
            sys.setprofile(self._profile)
            yield
        if self._asks_for_capture:
            raise NotRecordable("a capture takes another path than a call")

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # of nn.DataParallel: it only names what is timed
            return func(*args, **kwargs)
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise NotRecordable("values decide what is done")
        call = f"{func} {self._text(args)} {self._text(dict(kwargs))}"
        for tensor in written(func, args, kwargs, _RUNNING):
            if not self._is_own[tensor.untyped_storage()._cdata]:
                raise NotRecordable("something is changed that the call has not made")
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            self._know(tensor, f"%{len(self.lines)}.{index}", own=True)
        self.lines.append(f"{call} -> {[f'{self.label(tensor)} {_form(tensor)}' for tensor in tensors]}")
        return result

    def _know(self, tensor: Tensor, label: str, *, own: bool) -> None:
        place, storage = _place(tensor), tensor.untyped_storage()
        if place in self._label_of:
            return
        self._label_of[place] = label
        self._alive.append(tensor)
        if storage._cdata not in self._is_own:
            self._is_own[storage._cdata] = own
            self._bytes_left -= storage.nbytes() if own else 0
        if self._bytes_left < 0:
            raise NotRecordable("too much is made")

    def _text(self, value: object) -> str:
        if isinstance(value, Tensor):
            return self.label(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name}: {self._text(item)}' for name, item in value.items())}}}"
        if isinstance(value, _PLAIN):
            return repr(value)
        raise NotRecordable(f"an operator takes a {type(value).__name__}")

    def _guarded(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def guarded(tensor: Tensor, *args: object, **kwargs: object) -> object:
            if not self._reading:
                raise NotRecordable(f"{name} gives values to Python")
            return method(tensor, *args, **kwargs)

        return guarded

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Called for each call and return. An import runs code too, but only in the first call of all."""
        code = frame.f_code
        if event == "call" and code in _IS_CAPTURED and frame.f_back and _is_users(frame.f_back.f_code.co_filename):
            self._asks_for_capture = True  # Python would ignore an exception here
        if (code.co_filename, code.co_name) == _IMPORTING:
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._importing and _is_users(code.co_filename):
            self.code.add(code_digest(code))


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _place(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@functools.cache
def _is_users(file: str) -> bool:
    if is_library_file(file) or file.startswith(_SAMBA):
        return False
    return not any(folder in Path(file).parts for folder in _INSTALLED)
