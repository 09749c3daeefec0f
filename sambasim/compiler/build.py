"""The first program: captured graphs and symbols (parameters, buffers, and the constants that a trace found), one FWD
and one BCKWD section, no optimizer, no addresses yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sambasim.compiler.capture.recording import forward_line, read_by
from sambasim.compiler.capture.tensors import check_constant, check_memory, held_by, itself, memory_order
from sambasim.compiler.capture.trace import CapturedGraph, Role
from sambasim.compiler.names import UniqueNames, loss_name, symbol_name
from sambasim.compiler.translate import Translation, tensor_type
from sambasim.errors import ModelError
from sambasim.ir.graph import Graph, Output, Section, SectionKind, with_sections
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES, GRADIENT_SUFFIX, Symbol, SymbolKind, TensorType, gradient_name
from sambasim.ir.verify import Progress, verify
from sambasim.units import first_of


@dataclass(frozen=True, slots=True)
class Captures:
    """What was captured of one model: the training step (None for inference), and the evaluation graphs."""

    training: CapturedGraph | None
    evaluation: CapturedGraph
    single: CapturedGraph | None = None
    per_sample_loss: bool = False
    counts: bool = False
    logged: Mapping[str, int] = field(default_factory=dict)
    evaluated: Mapping[str, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """A program, the tensors of the model by symbol (parameters, buffers and constants), and notices of the model."""

    program: Program
    weights: Mapping[str, Tensor]
    notices: tuple[str, ...] = ()


class Builder:
    """Makes the first program of `model`, captured on `inputs`, and on what a run gives."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Tensor], captures: Captures, of_run: Mapping[str, Tensor]
    ) -> None:
        self._model, self._inputs, self._captures, self._of_run = model, {**inputs, **of_run}, captures, of_run
        self._prefix, self._held = type(model).__name__.lower(), held_by(model)
        self._symbols: dict[str, Symbol] = {}
        self._weights: dict[str, Tensor] = {}
        self._symbol_of_path: dict[str, str] = {}
        self._lifted: list[str] = []
        self._outputs: dict[int, str] = {}  # of the training step, by their index
        self._names = UniqueNames()
        for input_name in self._inputs:  # first of all: samples are bound to inputs by these names
            self._names.take(input_name)
        # Then the loss and its tangent, so that their names rarely get a number.
        self._loss = self._names.take(loss_name(self._prefix), GRADIENT_SUFFIX)

    def built(self, name: str, batch_size: int) -> Built:
        """Raises ModelError for shared memory or a loss that is a parameter; OperatorError for what no PEF can hold."""
        self._add_model_tensors()
        for input_name, tensor in self._inputs.items():
            # A fake tensor has no values.
            is_bounded = not (tensor.is_floating_point() or isinstance(tensor, FakeTensor)) and tensor.numel() > 0
            bound = max(int(tensor.max()) + 1, 1) if is_bounded else None
            kind = SymbolKind.ARGUMENT if input_name in self._of_run else SymbolKind.INPUT
            self._add(Symbol(input_name, kind, tensor_type(tensor), exclusive_bound=bound))
        captures = self._captures
        training = self._training(captures.training) if captures.training else None
        program = Program(
            name=name,
            batch_size=batch_size,
            symbols=self._symbols,
            training=training,
            evaluation=self._forward("evaluation", captures.evaluation),
            single=self._forward("single", captures.single) if captures.single else None,
            loss=self._loss if training else None,
            count=self._outputs[1] if training and captures.counts else None,
            logged={name: self._outputs[index] for name, index in captures.logged.items()} if training else {},
            evaluated=captures.evaluated if training else {},
            per_sample_loss=captures.per_sample_loss,
            optimizers=(),
            groups=(),
            runtime_arguments=(),
            device_bytes=0,
        )
        verify(program, Progress.CAPTURED)
        notices, cast_twice = list(captures.notices), captures.training.cast_twice if captures.training else ()
        if captures.training and any("recompute" in node.meta for node in captures.training.graph.nodes):
            notices.append("torch.utils.checkpoint in the model saves no memory here, and --recompute full does")
        if cast_twice:
            names = dict.fromkeys(self._symbols[self._symbol_of_path[path]].torch_names[0] for path in cast_twice)
            notices.append(
                f"read several times under torch.autocast: {first_of([*names])}; PyTorch adds up their gradients in 16 "
                "bits, and here they are added in the type of the parameter: results may differ in the last bits"
            )
        return Built(program, self._weights, tuple(notices))

    def _add(self, symbol: Symbol) -> None:
        self._symbols[symbol.name] = symbol

    def _add_model_tensors(self) -> None:
        training = self._captures.training
        # Buffers that a step changes, by their names in the model, such as `bn.running_mean`.
        outputs = training.outputs if training else ()
        self._changed = {_path(role.name) for _, role in outputs if role.kind == "buffer"}
        check_memory(self._held, self._changed)
        for held in self._held:
            name, kind = symbol_name(self._prefix, held.name), SymbolKind.CONSTANT
            if not self._changed.isdisjoint(held.paths):  # whether it is saved or not, and frozen parameters too
                kind = SymbolKind.BUFFER
            elif held.names:
                kind = SymbolKind.PARAMETER if held.is_parameter else SymbolKind.BUFFER
            name = self._names.take(name, *([GRADIENT_SUFFIX] if held.is_parameter else []))
            self._add(Symbol(name, kind, tensor_type(held.tensor), torch_names=held.names))
            self._weights[name] = held.tensor.detach().contiguous()
            self._symbol_of_path |= dict.fromkeys(held.paths, name)

    def _translated(self, captured: CapturedGraph) -> Translation:
        symbol_of = {}
        for name, role in captured.inputs.items():
            if role.kind == "input":
                symbol_of[name] = list(self._inputs)[int(role.name)]
            elif role.kind == "tangent":
                symbol_of[name] = gradient_name(self._outputs[int(role.name)])
            else:
                symbol_of[name] = self._symbol_of_path[_path(role.name)]
        for target, node in {str(node.target): node for node in captured.graph.find_nodes(op="get_attr")}.items():
            path = _path(target)
            known = self._symbol_of_path.get(path) if path != target else None
            symbol_of[target] = known or self._constant(path, captured.constants[target], read_by(node))
        return Translation(captured, self._prefix, symbol_of)

    def _constant(self, path: str, tensor: Tensor, where: str | None) -> str:
        """The symbol of a tensor that a trace made, or that the model has in a list, say. Each trace counts its own
        from 0, so the name says nothing: equal tensors share a symbol."""
        held = itself(tensor, self._held)
        if held is not None and self._changed.isdisjoint(held.paths):
            return self._symbol_of_path[held.paths[0]]
        check_constant(path, tensor, self._held, where)
        value = tensor.detach().permute(memory_order(tensor))  # see `trace.plain_constants`
        type_ = tensor_type(value)
        for name in self._lifted:
            if self._symbols[name].type == type_ and torch.equal(_bytes(self._weights[name]), _bytes(value)):
                return name
        name = self._names.take(symbol_name(self._prefix, path))
        self._add(Symbol(name, SymbolKind.CONSTANT, type_))
        self._weights[name] = value
        self._lifted.append(name)
        return name

    def _training(self, captured: CapturedGraph) -> Graph:
        # The first output from which the backward starts is the loss; the others are numbered.
        first = captured.losses[0]
        indices = sorted(int(role.name) for _, role in captured.outputs if role.kind == "output")
        self._outputs[first] = self._loss
        for number, index in enumerate(index for index in indices if index != first):
            self._outputs[index] = self._names.take(f"{self._prefix}__outputs__{number}", GRADIENT_SUFFIX)
        translation = self._translated(captured)
        given_out = list(zip((role for _, role in captured.outputs), translation.outputs, strict=True))
        for role, value in given_out:
            if role.kind == "output" and int(role.name) in captured.losses:
                if int(role.name) == first:
                    self._check_loss(value, captured)
                tangent = gradient_name(self._outputs[int(role.name)])
                self._add(Symbol(tangent, SymbolKind.TANGENT, self._type(translation, value)))
        outputs = [Output(value, self._kept_in(role, self._type(translation, value))) for role, value in given_out]
        return _graph("training", translation, outputs)

    def _check_loss(self, value: str, captured: CapturedGraph) -> None:
        """Raises ModelError for a loss that is a tensor of the model, or a view of one: nothing differentiates that."""
        symbol = self._symbols.get(value)
        if symbol is not None:
            name = symbol.torch_names[0] if symbol.torch_names else symbol.name
            what = f"the loss is the {symbol.kind} {name} itself: there is nothing to compute"
        elif not any(role.kind == "gradient" for _, role in captured.outputs):
            what = "the loss is a view of a parameter: there is nothing to compute"
        else:
            return
        raise ModelError(what, remedy="return a loss that is computed from the inputs and the parameters")

    def _kept_in(self, role: Role, type_: TensorType) -> str:
        if role.kind == "buffer":
            return self._symbol_of_path[_path(role.name)]
        if role.kind == "gradient":
            name = gradient_name(self._symbol_of_path[_path(role.name)])
            self._add(Symbol(name, SymbolKind.GRADIENT, type_))
            return name
        index = int(role.name)
        if role.kind == "input_gradient":
            name = self._names.take(gradient_name(list(self._inputs)[index]))
        else:
            name = self._outputs[index]
        self._add_output(name, type_, index)
        return name

    def _add_output(self, name: str, type_: TensorType, index: int) -> None:
        if type_.dtype not in DTYPE_BYTES:
            what = f"output {index} of the model is {type_.dtype}: a PEF has complex numbers between operators only"
            remedy = "return torch.view_as_real(…) of it, or its absolute value"
            raise ModelError(what, where=forward_line(self._model), remedy=remedy)
        self._add(Symbol(name, SymbolKind.OUTPUT, type_))

    def _forward(self, graph_name: str, captured: CapturedGraph) -> Graph:
        translation, outputs = self._translated(captured), []
        for index, value in enumerate(translation.outputs):
            name = self._names.take(f"{self._prefix}__{graph_name}__outputs__{index}")
            self._add_output(name, self._type(translation, value), index)
            outputs.append(Output(value, name))
        return _graph(graph_name, translation, outputs)

    def _type(self, translation: Translation, value: str) -> TensorType:
        return translation.values.get(value) or self._symbols[value].type


def _path(target: str) -> str:
    return target.removeprefix("model.")  # the user's module is the attribute `model` of what is captured


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _graph(name: str, translation: Translation, outputs: Sequence[Output]) -> Graph:
    forward = [node for node in translation.nodes if node.name not in translation.backward]
    backward = [node for node in translation.nodes if node.name in translation.backward]
    graph = Graph(name, translation.inputs, (), tuple(outputs), translation.values)
    sections = Section(0, SectionKind.FWD, "forward", 0, 0), Section(1, SectionKind.BCKWD, "backward", 0, 0)
    return with_sections(graph, zip(sections, (forward, backward), strict=True))
