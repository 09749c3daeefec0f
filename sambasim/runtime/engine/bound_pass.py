"""The pass of a graph (forward and backward) bound to tensors: its registers and code, and what it stores and returns.

Registers of symbols hold views of device memory; a gradient is stored in its group as soon as it is complete.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.ir.dataflow import pass_and_update, spans_of_actions
from sambasim.ir.graph import Graph, Node, Output, SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.handlers import Binding
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Registers
from sambasim.runtime.engine.lowering import lower
from sambasim.runtime.engine.straight_line import Part, PassLines, by_part
from sambasim.runtime.transports.transport import Transport
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import Function

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import; plain runs do without

Tangent: TypeAlias = Tensor | dict[str, Tensor] | None
"""The gradient that a backward starts from: of the loss, or by symbol, of several outputs."""


@dataclass(frozen=True, slots=True)
class Place:
    """A symbol, and the register that holds its value."""

    symbol: str
    register: int


@dataclass(frozen=True, slots=True)
class Changed:
    """A buffer that a stage of a pipeline changes, with the registers of its value before and after."""

    before: int
    after: int
    buffer: Tensor


class BoundPass:
    """`tensor_of`: the tensor of every symbol, always the same one. `engine`: compiles the pass; None calls torch's
    operators one by one. `wanted`: the symbol of the only output that is returned; None for all. `function_of`: what
    to call for a node in place of a function. Raises PefError, and OptionError if `engine` cannot compile the
    pass."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        tensor_of: Callable[[str], Tensor],
        *,
        transport: Transport | None = None,
        optimizers: Optimizers | None = None,
        engine: "Inductor | None" = None,
        wanted: str | None = None,
        function_of: Callable[[Node, Function], Function] | None = None,
    ) -> None:
        self.graph, self._program, self._tensor_of = graph, program, tensor_of
        self.registers = RegisterFile()
        self.sections, self.update_sections = pass_and_update(graph)
        nodes = [node for section in self.sections for node in graph.section_nodes(section)]
        kinds = {name: symbol.kind for name, symbol in program.symbols.items()}
        schedule = program.schedule if graph is program.training else None
        self.draws_random_numbers = any(OPERATORS[node.operator].draws_random_numbers for node in nodes)
        self.keeps_order = schedule is None or schedule.keeps_order

        def outputs(kind: SymbolKind) -> Sequence[Output]:
            return [output for output in graph.outputs if kinds[output.symbol] is kind]

        gradients, buffers = outputs(SymbolKind.GRADIENT), outputs(SymbolKind.BUFFER)
        returned = [one for one in outputs(SymbolKind.OUTPUT) if wanted in (None, one.symbol)]
        tangents = {name for name in graph.inputs if kinds[name] is SymbolKind.TANGENT}
        by_micro_batch = {one.symbol for one in buffers} | {
            name for name in graph.inputs if kinds[name] is SymbolKind.INPUT
        }
        register = self.registers.value
        self._tangents = {name: register(name) for name in graph.inputs if name in tangents}
        for name in graph.inputs:
            number = register(name)
            if name not in tangents and (schedule is None or name not in by_micro_batch):
                self.registers.initial[number] = tensor_of(name)
        self._kept_storages = {
            tensor.untyped_storage().data_ptr() for tensor in self.registers.initial if isinstance(tensor, Tensor)
        }
        self._shares_memory: dict[int, bool] = {}

        late = tangents | {
            name
            for section in self.sections
            if section.kind is SectionKind.BCKWD
            for node in graph.section_nodes(section)
            for name in node.results
        }
        self.of_forward = [Place(one.symbol, register(one.value)) for one in returned if one.value not in late]
        self.of_backward = [Place(one.symbol, register(one.value)) for one in returned if one.value in late]
        self.returned = [Place(one.symbol, register(one.value)) for one in returned]
        self._buffers = [(register(one.value), tensor_of(one.symbol)) for one in buffers]
        self.changed = {} if schedule is None else self._changed_by_stage(buffers)
        self.spans = {} if schedule is None else spans_of_actions(self.sections)

        # A gradient may be an input itself (if the loss is a bare parameter): then no node completes it.
        computed = set(graph.values)
        self._from_inputs = [(register(o.value), tensor_of(o.symbol)) for o in gradients if o.value not in computed]
        stores: dict[str, list[Tensor]] = defaultdict(list)
        for output in gradients:
            if output.value in computed:
                stores[output.value].append(tensor_of(output.symbol))
        # Gradients are stored at once; only outputs and changed buffers are needed at the end of the pass.
        keep = {output.value for output in (*returned, *buffers)}
        if not self.keeps_order:  # no instruction is the last reader in every micro-batch, so all values are kept
            keep |= {name for node in nodes for name in node.reads}
        lowered = lower(nodes, Binding(self.registers, graph.values, stores, tensor_of, transport, optimizers), keep)
        if function_of is not None:
            lowered = [one and replace(one, function=function_of(one.node, one.function)) for one in lowered]
        parts = self._parts(lowered, nodes, engine, stores, keep)
        in_one_piece = schedule is None or schedule.backward_in_one_piece
        self.lines = PassLines(parts, self.sections, stores, keep, watches=in_one_piece)
        self.ends_with_work = bool(self._buffers or self._from_inputs or self.lines.is_watching)
        """Whether `store_buffers` and `end` have anything to do."""
        self.forward_sections = sum(section.kind is SectionKind.FWD for section in self.sections)

    def _parts(
        self,
        lowered: Sequence[Instruction | None],
        nodes: Sequence[Node],
        engine: "Inductor | None",
        stores: Mapping[str, Sequence[Tensor]],
        keep: set[str],
    ) -> Sequence[Part]:
        sizes = [section.stop - section.start for section in self.sections]
        if engine is None:
            return by_part(lowered, [(1, size) for size in sizes])
        if any(node.operator.startswith("comm.") for node in nodes):
            what = "inductor cannot compile a pass that communicates"
            raise OptionError(what, remedy="run it with --engine plain")
        kinds = [section.kind for section in self.sections]
        return engine.lower(
            lowered, nodes, list(zip(kinds, sizes, strict=True)), self.registers, stores, keep, self._tensors()
        )

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of the graph's inputs by symbol, with an uninitialized one for each tangent."""
        types = {name: self._program.symbols[name].type for name in self._tangents}
        like = {name: torch.empty(type_.shape, dtype=getattr(torch, type_.dtype)) for name, type_ in types.items()}
        return like | {name: self._tensor_of(name) for name in self.graph.inputs if name not in like}

    def _changed_by_stage(self, buffers: Sequence[Output]) -> Mapping[int, Sequence[Changed]]:
        register, found = self.registers.value, defaultdict(list)
        for section in self.sections:
            made = {name for node in self.graph.section_nodes(section) for name in node.results}
            for one in buffers:
                if one.value in made:
                    changed = Changed(register(one.symbol), register(one.value), self._tensor_of(one.symbol))
                    found[section.stage].append(changed)
        return found

    def begin(self, tangent: Tangent) -> Registers:
        """New registers."""
        live = self.registers.initial.copy()
        self.set_tangents(live, tangent)
        return live

    def begin_micro_batch(self, tangent: Tangent, batch: Mapping[str, Tensor]) -> Registers:
        """New registers. `batch`: the inputs that do not lie in device memory, by symbol."""
        live = self.begin(tangent)
        for name, tensor in batch.items():
            if self.registers.has(name):
                live[self.registers.value(name)] = tensor
        return live

    def set_tangents(self, live: Registers, tangent: Tangent) -> None:
        for name, register in self._tangents.items():
            live[register] = tangent[name] if type(tangent) is dict else tangent

    def outputs(self, live: Registers, places: Sequence[Place]) -> dict[str, Tensor]:
        """The tensors at `places` by symbol; copied if they share memory with a symbol."""
        found, shares_memory = {}, self._shares_memory
        for place in places:
            value = tensor_in(live, place.register)
            if place.register not in shares_memory:  # an operator returns a view in every pass or in none
                shares_memory[place.register] = value.untyped_storage().data_ptr() in self._kept_storages
            found[place.symbol] = value.clone() if shares_memory[place.register] else value
        return found

    def store_buffers(self, live: Registers) -> None:
        for register, destination in self._buffers:
            destination.copy_(tensor_in(live, register))

    def end(self, live: Registers, *, accumulate: bool) -> None:
        for register, destination in self._from_inputs:
            if accumulate:
                destination.add_(tensor_in(live, register))
            else:
                destination.copy_(tensor_in(live, register))
        self.record_direct_writes(accumulate=accumulate)

    def record_direct_writes(self, *, accumulate: bool) -> None:
        """After the first pass that wrote gradients: record which kernels can write directly into their memory. Later
        passes change nothing."""
        if self.lines.is_watching and not accumulate:
            self.lines.end_watching()
            self.ends_with_work = bool(self._buffers or self._from_inputs)


def tensor_in(live: Registers, register: int) -> Tensor:
    value = live[register]
    if not isinstance(value, Tensor):
        raise TypeError(f"register {register} holds a {type(value).__name__}")
    return value
