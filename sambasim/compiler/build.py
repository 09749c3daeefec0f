"""The first program: captured graphs and symbols, one FWD and one BCKWD section, no optimizer, no addresses yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sambasim.compiler.capture import CapturedGraph, Feed, Yield
from sambasim.compiler.names import gradient_name, symbol_name
from sambasim.compiler.translate import Translation, tensor_type, translate
from sambasim.ir.graph import Graph, Output, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.ir.verify import Stage, verify

_STEP_PREFIX = "model."  # the user's module is the attribute `model` of what is captured


@dataclass(frozen=True, slots=True)
class Captures:
    """What was captured of one model: the training step (None for inference), and the evaluation graphs."""

    training: CapturedGraph | None
    evaluation: CapturedGraph
    single: CapturedGraph | None
    per_sample_loss: bool


@dataclass(frozen=True, slots=True)
class Built:
    """A program, and the tensors of the model by symbol: parameters, buffers and constants."""

    program: Program
    weights: Mapping[str, Tensor]


def build(name: str, model: nn.Module, inputs: Mapping[str, Tensor], captures: Captures, batch_size: int) -> Built:
    """The first program of `model`, captured on `inputs` (by name, each with the batch first)."""
    return _Builder(name, model, inputs, captures, batch_size).run()


class _Builder:
    def __init__(
        self, name: str, model: nn.Module, inputs: Mapping[str, Tensor], captures: Captures, batch_size: int
    ) -> None:
        self._name = name
        self._prefix = type(model).__name__.lower()
        self._model = model
        self._inputs = inputs
        self._captures = captures
        self._batch_size = batch_size
        self._symbols: dict[str, Symbol] = {}
        self._weights: dict[str, Tensor] = {}
        self._symbol_of_path: dict[str, str] = {}

    def run(self) -> Built:
        self._add_model_tensors()
        for name, tensor in self._inputs.items():
            whole = not tensor.is_floating_point() and tensor.numel() > 0
            bound = int(tensor.max()) + 1 if whole else None
            self._add(Symbol(name, SymbolKind.INPUT, tensor_type(tensor), exclusive_bound=bound))
        captures = self._captures
        training = self._training(captures.training) if captures.training else None
        evaluation = self._forward("evaluation", captures.evaluation)
        single = self._forward("single", captures.single) if captures.single else None
        program = Program(
            name=self._name,
            batch_size=self._batch_size,
            symbols=self._symbols,
            training=training,
            evaluation=evaluation,
            single=single,
            loss=self._loss if training else None,
            per_sample_loss=captures.per_sample_loss,
            optimizers=(),
            groups=(),
            runtime_arguments=(),
            data_parallel=None,
            device_bytes=0,
        )
        verify(program, Stage.CAPTURED)
        return Built(program, self._weights)

    @property
    def _loss(self) -> str:
        return f"{self._prefix}__loss"

    def _add(self, symbol: Symbol) -> None:
        self._symbols[symbol.name] = symbol

    def _add_model_tensors(self) -> None:
        persistent = set(self._model.state_dict(keep_vars=True))
        paths_of: dict[int, list[str]] = {}
        for path, tensor in self._model_tensors():
            paths_of.setdefault(id(tensor), []).append(path)
        for path, tensor in self._model_tensors():
            paths = paths_of[id(tensor)]
            if path != paths[0]:
                self._symbol_of_path[path] = self._symbol_of_path[paths[0]]
                continue
            if isinstance(tensor, nn.Parameter):
                kind = SymbolKind.PARAMETER
            else:
                kind = SymbolKind.BUFFER if persistent & set(paths) else SymbolKind.CONSTANT
            torch_names = tuple(p for p in paths if p in persistent)
            symbol = Symbol(symbol_name(self._prefix, path), kind, tensor_type(tensor), torch_names=torch_names)
            self._add(symbol)
            self._weights[symbol.name] = tensor.detach().contiguous()
            self._symbol_of_path[path] = symbol.name

    def _model_tensors(self) -> list[tuple[str, Tensor]]:
        parameters = list(self._model.named_parameters(remove_duplicate=False))
        return [*parameters, *self._model.named_buffers(remove_duplicate=False)]

    def _symbols_of(self, captured: CapturedGraph) -> dict[str, str]:
        """The symbol behind every placeholder and lifted constant; makes those of constants that the trace made."""
        symbol_of = {placeholder: self._symbol_of_feed(feed, captured) for placeholder, feed in captured.feeds.items()}
        for target, tensor in captured.constants.items():
            if target not in symbol_of:
                symbol_of[target] = self._constant(target, tensor)
        return symbol_of

    def _symbol_of_feed(self, feed: Feed, captured: CapturedGraph) -> str:
        if feed.kind == "input":
            return list(self._inputs)[int(feed.name)]
        if feed.kind == "tangent":
            return gradient_name(self._loss)
        path = feed.name.removeprefix(_STEP_PREFIX)
        if path in self._symbol_of_path:
            return self._symbol_of_path[path]
        return self._constant(path, captured.constants[feed.name])

    def _constant(self, path: str, tensor: Tensor) -> str:
        name = symbol_name(self._prefix, path)
        self._add(Symbol(name, SymbolKind.CONSTANT, tensor_type(tensor)))
        self._weights[name] = tensor.detach().contiguous()
        return name

    def _training(self, captured: CapturedGraph) -> Graph:
        tangent = gradient_name(self._loss)
        symbol_of = self._symbols_of(captured)
        translation = translate(captured, self._prefix, symbol_of)
        loss_type = self._type(translation, translation.outputs[_loss_position(captured.yields)])
        self._add(Symbol(tangent, SymbolKind.TANGENT, loss_type))
        outputs = []
        for (_, yielded), value in zip(captured.yields, translation.outputs, strict=True):
            symbol = self._kept_in(yielded, self._type(translation, value))
            outputs.append(Output(value, symbol))
        forward = [node for node in translation.nodes if node.name not in translation.backward]
        backward = [node for node in translation.nodes if node.name in translation.backward]
        sections = _whole_sections(
            ("forward", SectionKind.FWD, len(forward)), ("backward", SectionKind.BCKWD, len(backward))
        )
        inputs = tuple(dict.fromkeys(symbol_of.values()))
        return Graph("training", inputs, (*forward, *backward), tuple(outputs), translation.values, sections)

    def _kept_in(self, yielded: Yield, type_: TensorType) -> str:
        path = yielded.name.removeprefix(_STEP_PREFIX)
        if yielded.kind == "buffer":
            return self._symbol_of_path[path]
        if yielded.kind == "gradient":
            name = gradient_name(self._symbol_of_path[path])
            self._add(Symbol(name, SymbolKind.GRADIENT, type_))
            return name
        name = self._loss if yielded.name == "0" else f"{self._prefix}__outputs__{int(yielded.name) - 1}"
        self._add(Symbol(name, SymbolKind.OUTPUT, type_))
        return name

    def _forward(self, graph_name: str, captured: CapturedGraph) -> Graph:
        symbol_of = self._symbols_of(captured)
        translation = translate(captured, self._prefix, symbol_of)
        outputs = []
        for index, value in enumerate(translation.outputs):
            name = f"{self._prefix}__{graph_name}__outputs__{index}"
            self._add(Symbol(name, SymbolKind.OUTPUT, self._type(translation, value)))
            outputs.append(Output(value, name))
        nodes = tuple(translation.nodes)
        inputs = tuple(dict.fromkeys(symbol_of.values()))
        sections = _whole_sections(("forward", SectionKind.FWD, len(nodes)))
        return Graph(graph_name, inputs, nodes, tuple(outputs), translation.values, sections)

    def _type(self, translation: Translation, value: str) -> TensorType:
        return translation.values.get(value) or self._symbols[value].type


def _loss_position(yields: Sequence[tuple[object, Yield]]) -> int:
    return next(i for i, (_, yielded) in enumerate(yields) if yielded == Yield("output", "0"))


def _whole_sections(*parts: tuple[str, SectionKind, int]) -> tuple[Section, ...]:
    sections: list[Section] = []
    start = 0
    for name, kind, count in parts:
        if count:
            sections.append(Section(len(sections), kind, name, start, start + count))
            start += count
    return tuple(sections)
