"""The user's model in eager PyTorch, beside a PEF: the same tensors, the same random numbers, the same optimizer. It
computes in a copy of this process, while the PEF is played. Models whose `train()` or `eval()` changes weights are
refused: a PEF has one set of weights."""

import inspect
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sambasim.commands.proof.played import Batch, Played, seed_of
from sambasim.compiler.capture.asked_values import modes_reach_inside
from sambasim.compiler.capture.recording import Recording, digest_of, first_line
from sambasim.compiler.capture.sharing import is_dense
from sambasim.compiler.capture.step import Example, Loss, Losses, both_steps
from sambasim.compiler.capture.tensors import Widened, held_by
from sambasim.compiler.capture.trial import modes_kept, quiet
from sambasim.compiler.names import symbol_name
from sambasim.compiler.own_optimizer import OwnUpdate, own_update
from sambasim.errors import CaptureError, MachineError, ModelError
from sambasim.forks import Fork
from sambasim.ir.program import STEP, Program
from sambasim.ir.types import SymbolKind
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.compile import CompileOptions
from sambasim.runtime.machine.process import seed_everything
from sambasim.whose_code import is_library_file

_SMALL_BYTES = 1 << 20
"""Larger buffers are sent only if a step changes them: they may be weights in another form."""


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


class Eager:
    """The model of `live`, which is changed: it takes the tensors of the PEF with `program`, and keeps them."""

    def __init__(self, live: LiveModel, options: CompileOptions, program: Program) -> None:
        model = live.model
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
        """The loss of a training step on `batch`, of any size; None if it draws random numbers, or fails."""
        before = torch.get_rng_state()
        with quiet(), torch.no_grad(), suppress(Exception):
            loss = float(self._step(*(tensor.clone() for tensor in batch.values()))[0])
            return loss if torch.equal(before, torch.get_rng_state()) else None
        return None

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

    def gradient(self, parameter: str) -> Tensor | None:
        gradient = self.tensors[parameter].grad
        return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient

    def update(self) -> bool:
        """A first step of the user's optimizers, or of torch's of the same kind; False if torch has none."""
        narrow = (torch.bfloat16, torch.float16) if self._rounds else ()
        wide = {name: tensor for name, tensor in self.tensors.items() if tensor.dtype in narrow}
        if self._optimizers and not wide:
            for own in self._optimizers:
                own.state.clear()
                own.step()
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


class Trained(NamedTuple):
    """`outputs` by chip and micro-batch, `buffers` by chip and symbol, and `others` with a gradient, not trained."""

    outputs: Sequence[Sequence[Sequence[Tensor]]]
    buffers: Sequence[Mapping[str, Tensor]]
    others: Sequence[str]


class Beside:
    """A copy of this process with `eager` as it is now, which takes the tensors of `played` before each request.
    `shared`: tensors of both processes, for each trained parameter its gradient; after an update its new value."""

    def __init__(self, eager: Eager, played: Played) -> None:
        self._eager, program = eager, played.program
        changed = {output.symbol for output in program.leading.outputs}
        buffers = [name for name in eager.tensors if program.symbols[name].kind is SymbolKind.BUFFER]
        self._buffers = [name for name in buffers if name in changed or eager.tensors[name].nbytes <= _SMALL_BYTES]
        trained = [member.parameter for group in program.groups for member in group.members]
        self.shared = {name: _in_shared_memory(eager.tensors[name]) for name in trained}
        self.is_behind = False  # whether the copy has other parameters than `played`
        self._fork: Fork[Any] = Fork(self._answer, partial(torch.set_num_threads, 1), fresh=False)
        self.close = self._fork.close

    def begin(self, played: Played, what: str, *request: object) -> None:
        """Have the copy `train`, `evaluate`, `update`, or tell the `loss` or the `values` of a batch."""
        if self.is_behind:
            for name, tensor in self.shared.items():
                tensor.copy_(played.read(name))
        chips = range(played.program.chips)
        buffers = [{name: played.read(name, chip) for name in self._buffers} for chip in chips]
        self._fork.begin(alone((what, self.is_behind, buffers, *request)))
        self.is_behind = False

    def end(self) -> Any:
        """What was asked for; None if PyTorch could not do it. Raises MachineError if its process has ended."""
        answer = self._fork.end()
        if self._fork.is_gone:
            what = "the process of eager PyTorch has ended, by a crash or for lack of memory"
            raise MachineError(what, remedy="a smaller batch or model; or --check 0")
        return answer

    def ask(self, played: Played, what: str, *request: object) -> Any:
        self.begin(played, what, *request)
        return self.end()

    def _answer(self, request: tuple[Any, ...]) -> object:
        what, is_behind, buffers, *rest = request
        self._eager.take({**(self.shared if is_behind else {}), **buffers[0]})
        match what:
            case "train":
                return alone(self._train(buffers, *rest))
            case "update":
                return self._update()
            case "values":
                (batch,) = rest
                with _Values() as values:
                    self._eager.forward_and_backward(batch, seed_of(0, 0, 0), 1.0)
                return alone(values.keys)
        return alone(getattr(self._eager, what)(*rest))

    def _train(self, buffers: Sequence[Batch], of_chips: Sequence[Sequence[Batch]], number: int) -> Trained:
        eager, outputs, kept = self._eager, [], []
        for tensor in eager.tensors.values():
            tensor.grad = None
        for chip, batches in enumerate(of_chips):
            eager.take(buffers[chip])
            scale = 1 / (len(batches) * len(of_chips))
            seeds = (seed_of(number, chip, at) for at in range(len(batches)))
            outputs.append([eager.forward_and_backward(batch, next(seeds), scale) for batch in batches])
            kept.append({name: eager.tensors[name].detach().clone() for name in self._buffers})
        gradients = {name: eager.gradient(name) for name in eager.tensors}
        for name, shared in self.shared.items():
            gradient = gradients.pop(name)
            shared.zero_() if gradient is None else shared.copy_(gradient)
        others = [name for name, gradient in gradients.items() if gradient is not None and gradient.any()]
        return Trained(outputs, kept, others)

    def _update(self) -> bool:
        for name, gradient in self.shared.items():
            before = self._eager.tensors[name].grad
            if before is None or before.layout is not torch.strided or not torch.equal(before, gradient):
                self._eager.tensors[name].grad = gradient.clone()
        is_done = self._eager.update()
        for name, shared in self.shared.items():
            shared.copy_(self._eager.tensors[name].detach())
        return is_done


def alone(values: Any) -> Any:
    """`values` with copies of tensors that are parts of others, which pickle would write whole."""

    def of_its_own(value: object) -> object:
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() <= value.nbytes:
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(of_its_own, values)


def _in_shared_memory(tensor: Tensor) -> Tensor:
    """A tensor like this one, that a copy of this process has too."""
    memory = torch.frombuffer(mmap.mmap(-1, max(tensor.nbytes, 1)), dtype=torch.uint8)
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


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
