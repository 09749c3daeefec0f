"""The user's model in eager PyTorch, beside a PEF: the same tensors, the same random numbers, the same optimizer. It
computes each step before the PEF is played. Models whose `train()` or `eval()` changes weights are refused: a PEF has
one set of weights."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.commands.proof.played import Batch, Played, seed_of
from sambasim.compiler.capture.asked_values import modes_reach_inside
from sambasim.compiler.capture.recording import Recording, digest_of, first_line
from sambasim.compiler.capture.sharing import is_dense
from sambasim.compiler.capture.snapshot import process_state
from sambasim.compiler.capture.step import Example, Loss, Losses, both_steps
from sambasim.compiler.capture.tensors import Widened, held_by
from sambasim.compiler.capture.trial import modes_kept, quiet
from sambasim.compiler.names import symbol_name
from sambasim.compiler.own_optimizer import OwnUpdate, own_update
from sambasim.errors import CaptureError, InternalError, ModelError
from sambasim.ir.program import STEP, Program
from sambasim.ir.types import SymbolKind
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.compile import CompileOptions
from sambasim.runtime.machine.process import seed_everything, silent
from sambasim.whose_code import is_library_file

T = TypeVar("T")

COMPUTES, PLAYS = "eager PyTorch computes", "the PEF is played"
"""What a proof is doing."""

_SMALL_BYTES = 1 << 20
"""Larger buffers are taken only if a step changes them: they may be weights in another form."""


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model, a batch of a pass, and `whole`, that of a replica, where it is known; the user's own: `optimizers` of
    torch, and by name functions that are `own` optimizers."""

    model: nn.Module
    example: Example
    loss: Loss | None = None
    losses: Losses | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    whole: Batch | None = None
    own: Mapping[str, OwnUpdate] = field(default_factory=dict)


class NotForEager(Exception):
    """PyTorch itself cannot run a step on this batch."""


class Trained(NamedTuple):
    """`outputs` by chip and micro-batch, `buffers` by chip and symbol; `gradients` of trained parameters, by symbol,
    and `others` that have one."""

    outputs: Sequence[Sequence[Sequence[Tensor]]]
    buffers: Sequence[Batch]
    gradients: Batch
    others: Sequence[str]


class Eager:
    """The model of `live`, which is changed: it takes the tensors of the PEF with `program`, and keeps them. `on_doing`
    is told when it begins and ends to compute."""

    def __init__(
        self, live: LiveModel, options: CompileOptions, program: Program, on_doing: Callable[[str], object]
    ) -> None:
        model, self._on_doing = live.model, on_doing
        if not (model.training or options.inference):
            model.train()
        self._step, self._evaluation = both_steps(model, live.example, options, live.loss, live.losses)
        self._program = program
        self._optimizers, self._own = live.optimizers, live.own
        self._named = options.optimizer.updates() if options.optimizer is not None else ()
        self._rounds = options.dtype != "fp32"
        self.tensors = dict(_by_symbol(model, program))  # the parameters and buffers of the model, by symbol
        for name, symbol in program.symbols.items():
            tensor = self.tensors.get(name)
            if symbol.torch_names and (tensor is None or tuple(tensor.shape) != symbol.whole.shape):
                what = f"the model has no {symbol.kind} {symbol.torch_names[0]} of {symbol.whole}, as the PEF has"
                raise ModelError(what, remedy="name the model that was compiled")
        changed = {output.symbol for output in program.leading.outputs}
        buffers = [name for name in self.tensors if program.symbols[name].kind is SymbolKind.BUFFER]
        self._buffers = [name for name in buffers if name in changed or self.tensors[name].nbytes <= _SMALL_BYTES]
        self._trained = [member.parameter for group in program.groups for member in group.members]
        self.is_behind = False  # whether it has other parameters than the PEF that is played

    def ask(self, played: Played, compute: Callable[[], T]) -> T:
        """What `compute` returns, with the tensors of `played`; it prints nothing. Raises NotForEager if PyTorch cannot
        do it, and CaptureError if it changes settings of this process, in which the PEF is played too."""
        self.take({name: played.read(name) for name in (*self._buffers, *(self._trained if self.is_behind else ()))})
        self.is_behind, before = False, process_state()
        self._on_doing(COMPUTES)
        try:
            with silent(1, 2):
                result = compute()
        except InternalError:
            raise
        except (Exception, SystemExit) as error:
            raise NotForEager from error
        finally:
            self._on_doing(PLAYS)
        now = process_state()
        if changed := next((name for name in now if now[name] != before[name]), None):
            raise CaptureError(f"forward() changes {changed}, which is of the process", remedy="set it outside")
        return result

    def train(self, played: Played, of_chips: Sequence[Sequence[Batch]], number: int) -> Trained:
        """Forward and backward of step `number`, of the micro-batches of each chip."""
        outputs, kept = [], []
        for tensor in self.tensors.values():
            tensor.grad = None
        for chip, batches in enumerate(of_chips):
            self.take({name: played.read(name, chip) for name in self._buffers})
            scale = 1 / (len(batches) * len(of_chips))
            seeds = (seed_of(number, chip, at) for at in range(len(batches)))
            outputs.append([self.forward_and_backward(batch, next(seeds), scale) for batch in batches])
            kept.append({name: self.tensors[name].detach().clone() for name in self._buffers})
        found = {name: gradient for name in self.tensors if (gradient := self._gradient(name)) is not None}
        gradients = {name: found.pop(name) for name in self._trained if name in found}
        return Trained(outputs, kept, gradients, [name for name, gradient in found.items() if gradient.any()])

    def forward_and_backward(self, batch: Batch, seed: int, scale: float) -> list[Tensor]:
        """The outputs of one pass, in the order of the PEF. Gradients of the loss times `scale` are added up."""
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batch.values()]
        seed_everything(seed)
        with quiet(), modes_reach_inside(), self._rounding():
            outputs = self._step(*inputs)
            starts = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(starts, [torch.full_like(output, scale) for output in starts])
        return [output.detach() for output in outputs]

    def loss(self, batch: Batch) -> float | None:
        """The loss of a training step on `batch`, of any size; None if it draws random numbers."""
        before = torch.get_rng_state()
        with quiet(), torch.no_grad():
            loss = float(self._step(*(tensor.clone() for tensor in batch.values()))[0])
        return loss if torch.equal(before, torch.get_rng_state()) else None

    def values(self, batch: Batch) -> "set[Key]":
        """The keys of all that a pass computes."""
        values = _Values()
        with values:
            self.forward_and_backward(batch, seed_of(0, 0, 0), 1.0)
        return values.keys

    def evaluate(self, batch: Batch, seed: int) -> list[Tensor]:
        """The outputs in evaluation mode. Gradients are enabled: without, torch has other kernels for some layers."""
        with modes_kept(self._evaluation):
            self._evaluation.eval()
            seed_everything(seed)
            with quiet(), modes_reach_inside(), self._rounding():
                return [tensor.detach() for tensor in self._evaluation(*(tensor.clone() for tensor in batch.values()))]

    def _rounding(self) -> AbstractContextManager[object]:
        """In a narrow type a PEF adds up in float32 what eager PyTorch does not."""
        return Widened() if self._rounds else nullcontext()

    def _gradient(self, parameter: str) -> Tensor | None:
        gradient = self.tensors[parameter].grad
        return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient

    def update(self, gradients: Batch) -> bool:
        """A first step of the user's optimizers, or of torch's of the same kind, with these `gradients`; False if torch
        has none."""
        for name, gradient in gradients.items():
            own = self.tensors[name].grad
            if own is None or own.layout is not torch.strided or not torch.equal(own, gradient):
                self.tensors[name].grad = gradient.clone()
        narrow = (torch.bfloat16, torch.float16) if self._rounds else ()
        wide = {name: tensor for name, tensor in self.tensors.items() if tensor.dtype in narrow}
        if self._optimizers and not wide:
            for optimizer in self._optimizers:
                optimizer.state.clear()
                optimizer.step()
            return True
        updated = {name: tensor.detach().float() if name in wide else tensor for name, tensor in self.tensors.items()}
        for name, tensor in wide.items():
            updated[name].grad = None if tensor.grad is None else tensor.grad.float()
        steps = self._first_steps(updated)
        for step in steps:
            step()
        for name, tensor in wide.items():
            tensor.data.copy_(updated[name])
        return bool(steps)

    def _first_steps(self, tensors: Mapping[str, Tensor]) -> list[Callable[[], object]]:
        """Of each optimizer of the PEF: of torch's, or of the user's function. None if torch lacks one of them."""
        steps = list[Callable[[], object]]()
        defaults = {argument.name: argument.default for argument in self._program.runtime_arguments}
        for number, optimizer in enumerate(self._program.optimizers):
            groups, name = (group for group in self._program.groups if group.optimizer == number), optimizer.name
            parameters = [tensors[member.parameter] for group in groups for member in group.members]
            if optimizer.update is not None:
                function = own_update(self._named[number].name, self._own)
                keywords = [key for key in optimizer.update.inputs if key not in optimizer.regions]
                numbers = {key: 1 if key == STEP else defaults[f"{name}__{key}"] for key in keywords}
                states = len(optimizer.update.inputs) - len(numbers) - 2
                steps.append(partial(_first_step, function, parameters, states, numbers))
                continue
            entry = OPTIMIZERS[optimizer.kind]
            if entry.torch_name is None:
                return []
            options: dict[str, Any] = {key: defaults[f"{name}__{key}"] for key in entry.defaults if key != "betas"}
            if "betas" in entry.defaults:
                options["betas"] = tuple(defaults[f"{name}__beta{index}"] for index in (1, 2))
            steps.append(getattr(torch.optim, entry.torch_name)(parameters, **options).step)
        return steps

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """From now on the model's tensors of these symbols have these values."""
        with torch.no_grad():
            for symbol, value in tensors.items():
                if not torch.equal(self.tensors[symbol], value):
                    self.tensors[symbol].copy_(value)


@torch.no_grad()
def _first_step(function: OwnUpdate, parameters: Sequence[Tensor], states: int, numbers: Mapping[str, float]) -> None:
    """Of an optimizer of the user's own, with so many `states`."""
    for parameter in parameters:
        zeros = (torch.zeros_like(parameter) for _ in range(states))
        function(parameter, parameter.grad, *zeros, **numbers)


def _by_symbol(model: nn.Module, program: Program) -> Iterator[tuple[str, Tensor]]:
    symbols = {*program.names_of(SymbolKind.PARAMETER, SymbolKind.BUFFER)}
    by_name = {torch_name: name for name in symbols for torch_name in program.symbols[name].torch_names}
    prefix = type(model).__name__.lower()
    for held in held_by(model):
        symbol = next((by_name[name] for name in held.names if name in by_name), symbol_name(prefix, held.name))
        if symbol in symbols:
            yield symbol, held.tensor


Key: TypeAlias = tuple[object, ...]


def key_of(tensor: Tensor) -> Key:
    """What tells a tensor from others, whatever its strides."""
    return str(tensor.dtype), tuple(tensor.shape), digest_of(tensor)


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's, untyped
    """Within it, the keys of the results of all operators, in a forward and its backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.keys: set[Key] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.keys.update(map(key_of, filter(is_dense, tree_leaves(result))))
        return result


_REMEDY = (
    "leave the method out, and keep merged or averaged weights apart from those to train: compute them in forward(), "
    "w = self.a.weight + self.delta() if self.training else self.averaged, or merge them after training"
)


def check_modes(model: nn.Module, *, training: bool) -> None:
    """Raises CaptureError if a method of the user's that switches to evaluation, or back to training, changes a
    parameter, a buffer or another tensor of `model`, whose tensors are afterwards as they were."""
    if not any(map(_methods, model.modules())):
        return
    named = _tensors(model)
    recording = Recording(named)
    with ExitStack() as stack:
        stack.enter_context(modes_kept(model))
        stack.callback(recording.undo)
        for name in ("eval", "train") if training else ("eval",):
            with recording:
                getattr(model, name)()
            now = _tensors(model)
            slots = [label for op in recording.ops for label in op.writes]
            slots += [path for path in {**named, **now} if named.get(path) is not now.get(path)]
            if slots:
                raise _refused(model, name, slots[0] if slots[0].startswith("model") else "a tensor", training)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules(prefix="model")
        for name, value in {**module._parameters, **module._buffers, **vars(module)}.items()
        if isinstance(value, Tensor)
    }


def _methods(module: nn.Module) -> dict[str, FunctionType]:
    """The `train` and `eval` of a module that are not torch's, by their names."""
    unwrapped: dict[str, Any] = {name: inspect.unwrap(getattr(module, name)) for name in ("train", "eval")}
    plain = {name: getattr(method, "__func__", method) for name, method in unwrapped.items()}
    functions = {name: method for name, method in plain.items() if isinstance(method, FunctionType)}
    return {name: method for name, method in functions.items() if not is_library_file(method.__code__.co_filename)}


def _refused(model: nn.Module, called: str, slot: str, training: bool) -> CaptureError:
    """The error for `called`, which changes `slot`, at the method of the innermost module that has the slot."""
    switching = [(path, module) for path, module in model.named_modules(prefix="model") if _methods(module)]
    around = [module for path, module in switching if f"{slot}.".startswith(f"{path}.")]
    module = around[-1] if around else switching[-1][1]
    methods = _methods(module)
    name = called if called in methods else next(iter(methods))
    graph, where = "training step" if training else "evaluation graph", str(first_line(methods[name]))
    what = f"{name}() of {type(module).__name__} changes {slot}, and a PEF has one set of weights for both modes"
    remedy = _REMEDY if training else "call model.eval() before you compile"
    return CaptureError(f"the {graph} cannot be captured: {what}", where=where, remedy=remedy)
