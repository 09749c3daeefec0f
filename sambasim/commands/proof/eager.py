"""The user's model in eager PyTorch, beside a PEF: the same tensors, the same random numbers, the same optimizer.
Models whose `train()` or `eval()` changes weights are refused: a PEF has one set of weights."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.asked_values import modes_reach_inside
from sambasim.compiler.capture.names import symbol_name
from sambasim.compiler.capture.recording import Recording, line_of
from sambasim.compiler.capture.step import (
    EvaluationStep,
    Example,
    Loss,
    Losses,
    TrainingStep,
    per_sample_loss,
    training_loss,
)
from sambasim.compiler.capture.tensors import Widened, held_by
from sambasim.compiler.capture.trial import quiet
from sambasim.errors import CaptureError, ModelError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.compile import CompileOptions
from sambasim.runtime.machine.pytorch import seed_everything
from sambasim.whose_code import is_library_file


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model, and how it is called: see `compiler.compile.capture_model`. `inputs`: one batch of a pass, and `whole`
    that of a replica, where it is known; `optimizer`: the user's own, if there is one."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    by_keyword: bool
    loss: Loss | None = None
    arguments: Mapping[str, object] | None = None
    losses: Losses | None = None
    optimizer: torch.optim.Optimizer | None = None
    whole: Mapping[str, Tensor] | None = None


class Eager:
    """The model of `live`, which is changed: it takes the tensors of the PEF with `program`, and keeps them."""

    def __init__(self, live: LiveModel, options: CompileOptions, program: Program) -> None:
        model, named = live.model, options.loss
        if not (model.training or options.inference):
            model.train()
        mean = live.loss
        by_sample = None
        if named is not None and not options.inference and mean is None:
            mean, by_sample = training_loss(named.name, named.args), per_sample_loss(named.name, named.args)
        example = Example(live.inputs, live.by_keyword, live.arguments)
        self._step = TrainingStep(model, example, mean, live.losses)
        self._evaluation = EvaluationStep(model, example, by_sample or mean)
        self._program = program
        self._optimizer = live.optimizer
        self._rounds = options.dtype != "fp32"
        self.tensors = dict(_by_symbol(model, program))
        """The parameters and buffers of the model, by symbol."""
        symbols = program.symbols
        lacking = [symbol for symbol in symbols.values() if symbol.torch_names and symbol.name not in self.tensors]
        wrong = [name for name, tensor in self.tensors.items() if tuple(tensor.shape) != symbols[name].whole.shape]
        if lacking or wrong:
            first = (*lacking, *(program.symbols[name] for name in wrong))[0]
            what = f"the model has no {first.kind} {first.torch_names[0]} of {first.whole}, as the PEF has"
            raise ModelError(what, remedy="name the model that was compiled")

    def forward_and_backward(self, batch: Mapping[str, Tensor], seed: int, scale: float) -> list[Tensor]:
        """The outputs of one pass, in the order of the PEF's; gradients are added up. `scale`: by which the loss is
        multiplied."""
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batch.values()]
        seed_everything(seed)
        with quiet(), modes_reach_inside(), self._rounding():
            outputs = self._step(*inputs)
            starts = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(starts, [torch.full_like(output, scale) for output in starts])
        return [output.detach() for output in outputs]

    def loss(self, batch: Mapping[str, Tensor]) -> float | None:
        """The loss of a training step on `batch`, of any size; None if it draws random numbers, or fails."""
        before = torch.get_rng_state()
        with quiet(), torch.no_grad(), suppress(Exception):
            loss = float(self._step(*(tensor.clone() for tensor in batch.values()))[0])
            return loss if torch.equal(before, torch.get_rng_state()) else None
        return None

    def evaluate(self, batch: Mapping[str, Tensor], seed: int) -> list[Tensor]:
        """The outputs in evaluation mode. Gradients are enabled: without, torch has other kernels for some layers."""
        modes = [(module, module.training) for module in self._evaluation.modules()]
        self._evaluation.eval()
        seed_everything(seed)
        try:
            with quiet(), modes_reach_inside(), self._rounding():
                return [tensor.detach() for tensor in self._evaluation(*(tensor.clone() for tensor in batch.values()))]
        finally:
            for module, was_training in modes:
                module.training = was_training

    def _rounding(self) -> AbstractContextManager[object]:
        """In a narrow type a PEF adds up in float32 what eager PyTorch does not."""
        return Widened() if self._rounds else nullcontext()

    def gradient(self, parameter: str) -> Tensor | None:
        gradient = self.tensors[parameter].grad
        return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient

    def set_gradient(self, parameter: str, gradient: Tensor) -> None:
        tensor = self.tensors[parameter]
        has = tensor.grad
        if has is None or has.layout is not torch.strided or not torch.equal(has, gradient):
            tensor.grad = gradient.clone()

    def zero_gradients(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None

    def update(self) -> bool:
        """One step of the user's optimizer, or of torch's of the same kind, from its beginning; False if torch has
        none."""
        narrow = (torch.bfloat16, torch.float16) if self._rounds else ()
        wide = {name: tensor for name, tensor in self.tensors.items() if tensor.dtype in narrow}
        if self._optimizer is not None and not wide:
            self._optimizer.state.clear()
            self._optimizer.step()
            return True
        updated = {name: tensor.detach().float() if name in wide else tensor for name, tensor in self.tensors.items()}
        for name, tensor in wide.items():
            updated[name].grad = None if tensor.grad is None else tensor.grad.float()
        optimizers = self._torchs(updated)
        for optimizer in optimizers:
            optimizer.step()
        for name, tensor in wide.items():
            tensor.data.copy_(updated[name])
        return bool(optimizers)

    def _torchs(self, tensors: Mapping[str, Tensor]) -> list[torch.optim.Optimizer]:
        made: list[torch.optim.Optimizer] = []
        defaults = {argument.name: argument.default for argument in self._program.runtime_arguments}
        for number, optimizer in enumerate(self._program.optimizers):
            entry = OPTIMIZERS[optimizer.kind]
            if entry.torch_name is None:
                return []
            members = [m for group in self._program.groups if group.optimizer == number for m in group.members]
            options: dict[str, object] = {
                name: defaults[f"{optimizer.name}__{name}"] for name in entry.defaults if name != "betas"
            }
            if "betas" in entry.defaults:
                options["betas"] = tuple(defaults[f"{optimizer.name}__beta{index}"] for index in (1, 2))
            parameters = [tensors[member.parameter] for member in members]
            made.append(getattr(torch.optim, entry.torch_name)(parameters, **options))
        return made

    def take(self, symbol: str, value: Tensor) -> None:
        """From now on the model's tensor of `symbol` has this value."""
        tensor = self.tensors[symbol]
        with torch.no_grad():
            if not torch.equal(tensor, value):
                tensor.copy_(value)


def _by_symbol(model: nn.Module, program: Program) -> Iterator[tuple[str, Tensor]]:
    kinds = (SymbolKind.PARAMETER, SymbolKind.BUFFER)
    symbols = [symbol for symbol in program.symbols.values() if symbol.kind in kinds]
    by_name = {name: symbol.name for symbol in symbols for name in symbol.torch_names}
    prefix = type(model).__name__.lower()
    for held in held_by(model):
        symbol = next((by_name[name] for name in held.names if name in by_name), symbol_name(prefix, held.name))
        if symbol in program.symbols and program.symbols[symbol].kind in kinds:
            yield symbol, held.tensor


_REMEDY = (
    "leave the method out, and keep merged or averaged weights apart from those to train: compute them in forward(), "
    "w = self.a.weight + self.delta() if self.training else self.averaged, or merge them after training"
)


def check_modes(model: nn.Module, *, training: bool) -> None:
    """Raises CaptureError if a method of the user's that switches to evaluation, or back to training, changes a
    parameter, a buffer or another tensor of `model`, whose tensors are afterwards as they were."""
    if not any(map(_methods, model.modules())):
        return
    modes = [(module, module.training) for module in model.modules()]
    named = _tensors(model)
    recording = Recording(named)
    try:
        for name in ("eval", "train") if training else ("eval",):
            with recording:
                getattr(model, name)()
            now = _tensors(model)
            slots = [label for op in recording.ops for label in op.writes]
            slots += [path for path in {**named, **now} if named.get(path) is not now.get(path)]
            if slots:
                raise _refused(model, name, slots[0] if slots[0].startswith("model") else "a tensor", training)
    finally:
        recording.undo()
        for module, was_training in modes:
            module.training = was_training


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        ".".join(filter(None, ("model", path, name))): value
        for path, module in model.named_modules()
        for name, value in {**module._parameters, **module._buffers, **vars(module)}.items()
        if isinstance(value, Tensor)
    }


def _methods(module: nn.Module) -> list[tuple[str, FunctionType]]:
    """The `train` and `eval` of a module that are not torch's, by their names."""
    unwrapped: Iterator[tuple[str, Callable[..., object]]]
    unwrapped = ((name, inspect.unwrap(getattr(module, name))) for name in ("train", "eval"))
    plain = ((name, getattr(method, "__func__", method)) for name, method in unwrapped)
    return [
        (name, method)
        for name, method in plain
        if isinstance(method, FunctionType) and not is_library_file(method.__code__.co_filename)
    ]


def _refused(model: nn.Module, called: str, slot: str, training: bool) -> CaptureError:
    """The error for `model.train()` or `model.eval()` that changes `slot`, at the method of the innermost module that
    has the slot."""
    named = ((f"model.{path}" if path else "model", module) for path, module in model.named_modules())
    switching = [(path, module) for path, module in named if _methods(module)]
    around = [pair for pair in switching if f"{slot}.".startswith(f"{pair[0]}.")] or switching
    module = around[-1][1]
    methods = dict(_methods(module))
    name, method = (called, methods[called]) if called in methods else next(iter(methods.items()))
    what = f"{name}() of {type(module).__name__} changes {slot}, and a PEF has one set of weights for both modes"
    return CaptureError(
        f"the {'training step' if training else 'evaluation graph'} cannot be captured: {what}",
        where=line_of(method.__code__.co_filename, method.__code__.co_firstlineno),
        remedy=_REMEDY if training else "call model.eval() before you compile",
    )
