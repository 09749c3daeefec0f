"""Executes the pass of a graph, forward and backward, on one rank's device memory.

Registers of symbols hold views of device memory; a gradient is stored in its group as soon as it is complete. The pass
of a graph without stages has the schedule of one stage and one micro-batch. Execution is a generator, which yields only
where it must wait for another rank that this process runs (emulation).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.dataflow import pass_and_update, readiness, spans_of_actions
from sambasim.ir.graph import Graph, Output, SectionKind
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind, make
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.engine.handlers import Binding, lower
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Registers, Unit, value_of
from sambasim.runtime.engine.pass_code import PassCode, is_plain_view
from sambasim.runtime.transports.connect import Transport
from sambasim.runtime.transports.window import WindowReduce
from sambasim.runtime.values.memory import storage_of
from sambasim.runtime.watch.observer import StepObserver

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import; plain runs do without

R = TypeVar("R")

Steps: TypeAlias = Generator[None, None, R]
"""An execution that yields whenever it waits for another rank of this process."""

Batch: TypeAlias = Mapping[str, Tensor]  # inputs by symbol

IN_MEMORY: Sequence[Batch] = ({},)  # one micro-batch, whose inputs lie in device memory

Tangent: TypeAlias = Tensor | dict[str, Tensor] | None
"""The gradient that a backward starts from: of the loss, or by symbol, of several outputs."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Sections `start` to `stop`, which run in a row for one micro-batch, as its first or last. They make `outputs`, by
    symbol and register, and `changed` buffers, with the registers of their values before and after."""

    micro_batch: int
    start: int
    stop: int
    begins: bool
    ends: bool
    draws: bool = False
    outputs: Sequence[tuple[str, int]] = ()
    changed: Sequence[tuple[Tensor, int, int]] = ()


def _spans(
    ranges: Mapping[tuple[ActionKind, int], tuple[int, int]], actions: Sequence[Action], only: ActionKind | None
) -> list[_Span]:
    """What the `actions` of a rank run, or those of one kind `only`. `ranges`: sections, by kind and stage."""
    first = {action.micro_batch: action for action in reversed(actions)}
    last = {action.micro_batch: action for action in actions}
    spans: list[_Span] = []
    for action in actions:
        if only in (None, action.kind):
            number, behind = action.micro_batch, spans[-1].stop if spans else 0
            start, stop = ranges.get((action.kind, action.stage), (behind, behind))
            span = _Span(number, start, stop, action == first[number], action == last[number])
            if spans and (spans[-1].micro_batch, behind) == (number, start):
                before = spans.pop()
                span = replace(span, start=before.start, begins=before.begins)
            spans.append(span)
    return spans


class Executor:
    """The pass of one graph, bound to tensors. `engine`: compiles the pass; None calls torch's operators one by one.
    `wanted`: the only outputs that are returned; None for all. `observer`: replaces functions of instructions. Raises
    PefError, and OptionError if `engine` cannot compile the pass."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        tensor_of: Callable[[str], Tensor],
        engine: "Inductor | None" = None,
        wanted: Collection[str] | None = None,
        *,
        transport: Transport | None = None,
        observer: StepObserver | None = None,
        waited_s: dict[str, float] | None = None,
    ) -> None:
        self.graph, self.tensor_of = graph, tensor_of
        self.sections, self.update_sections = pass_and_update(graph)
        self.waited_s: dict[str, float] = defaultdict(float) if waited_s is None else waited_s
        """The seconds of communication in passes, by mesh axis, since the last update."""
        self.observer: StepObserver | None = None
        self._rank = 0 if transport is None else transport.rank
        self._registers = RegisterFile()
        self._of_micro_batch: dict[int, Registers] = {}  # until its backward has run
        self._live: Registers = []  # those of the micro-batch that runs
        self._overlapping: Sequence[WindowReduce] = ()
        self._began_ns = 0  # the sections that are reported next

        schedule = program.schedule if graph is program.training else None
        self._takes_batches = schedule is not None
        """Whether each micro-batch brings its inputs; otherwise they lie in device memory."""
        rank = transport.mesh.coordinate(self._rank, PIPELINE) if transport and schedule else 0
        actions = (schedule or make("gpipe", 1, 1)).rows[rank]
        self._keeps_order = schedule is None or schedule.keeps_order

        kinds = {name: symbol.kind for name, symbol in program.symbols.items()}
        self._inputs = {name: program.symbols[name] for name in graph.inputs if kinds[name] is SymbolKind.INPUT}
        register, initial = self._registers.value, self._registers.initial
        self._tangents = {name: register(name) for name in graph.inputs if kinds[name] is SymbolKind.TANGENT}
        of_kind = {kind: [out for out in graph.outputs if kinds[out.symbol] is kind] for kind in SymbolKind}
        buffers = of_kind[SymbolKind.BUFFER]
        returned = [output for output in of_kind[SymbolKind.OUTPUT] if wanted is None or output.symbol in wanted]
        of_micro_batch = {*self._inputs, *(output.symbol for output in buffers)} if schedule else ()
        for name in graph.inputs:
            number = register(name)
            if name not in self._tangents and name not in of_micro_batch:
                initial[number] = tensor_of(name)
        self._kept_storages = {storage_of(tensor) for tensor in initial if isinstance(tensor, Tensor)}
        self._shares_memory: dict[int, bool] = {}
        self._nodes_before = [0, *(section.stop for section in self.sections)]
        ranges = spans_of_actions(self.sections)
        if schedule is None:  # the whole graph is one stage, whatever its sections say
            forward = sum(section.kind is SectionKind.FWD for section in self.sections)
            ranges = {(ActionKind.FORWARD, 0): (0, forward), (ActionKind.BACKWARD, 0): (forward, len(self.sections))}
        section_of = dict.fromkeys(self._tangents, len(self.sections))
        for section in self.sections:
            for node in graph.section_nodes(section):
                section_of |= dict.fromkeys(node.makes, section.index)
        bound = partial(self._bound, section_of, returned, buffers)
        self._spans = {only: [*map(bound, _spans(ranges, actions, only))] for only in (None, *ActionKind)}

        # A gradient may be an input itself (if the loss is a bare parameter): then no node completes it.
        self._given_gradients: list[tuple[int, Tensor]] = []
        stores = self._registers.stores
        for output in of_kind[SymbolKind.GRADIENT]:
            if output.value in graph.values:
                stores.setdefault(output.value, []).append(tensor_of(output.symbol))
            else:
                self._given_gradients.append((register(output.value), tensor_of(output.symbol)))
        # Gradients are stored at once; only outputs and changed buffers are needed at the end of the pass.
        keep = {output.value for output in (*returned, *buffers)}
        nodes = graph.nodes[: self.sections[-1].stop] if self.sections else ()
        if not self._keeps_order:  # no instruction is the last reader in every micro-batch, so all values are kept
            keep |= {name for node in nodes for name in node.reads}
        lowered = lower(nodes, Binding(self._registers, graph.values, tensor_of, transport), keep)
        if observer is not None:
            lowered = [op and replace(op, function=observer.bind(self._rank, op.node, op.function)) for op in lowered]
        if engine is None:
            if observer is None:
                lowered = list(map(self._unless_constant, lowered))
            ready = readiness(program, by_node=True).values() if graph is program.training else ()
            moments = {at for of in ready for at in (of.reduce, of.update, *of.readers[:1])}
            ending = {section.stop: (section,) for section in self.sections}
            stops = sorted({*ending, *(at for at in moments if 0 < at < len(nodes))})
            parts = [(stop, tuple(filter(None, lowered[start:stop]))) for start, stop in pairwise([0, *stops])]
            units = [Unit(ending.get(stop, ()), instructions, stop) for stop, instructions in parts]
        else:
            types = {name: program.symbols[name].type for name in graph.inputs}
            units = engine.lower(lowered, nodes, self.sections, self._registers, keep, types)
        in_one_piece = schedule is None or schedule.backward_in_one_piece
        self._next_end = dict(pairwise([0, *(unit.stop for unit in units)]))
        """By number of nodes that have run, that after the next unit."""
        self._code = PassCode(units, stores if in_one_piece else {}, keep, self.waited_s)

    def _unless_constant(self, one: Instruction | None) -> Instruction | None:
        """None for a view of memory that is the same in all passes: it is made here."""
        if one is None or not is_plain_view(one.node) or one.stores:
            return one
        initial, (result,) = self._registers.initial, one.results
        of = initial[self._registers.value(one.node.reads[0])]
        if result is None or not isinstance(of, Tensor):
            return one
        view = one.function(*(value_of(operand, initial) for operand in one.operands))
        if not isinstance(view, Tensor) or storage_of(view) != storage_of(of):
            return one
        initial[result] = view
        return None

    def _bound(
        self, section_of: Mapping[str, int], returned: Sequence[Output], buffers: Sequence[Output], span: _Span
    ) -> _Span:
        """`span`, with what it makes. An input is there before section 0, a tangent behind all."""
        register = self._registers.value
        made = {*range(span.start, span.stop), *(-1,) * span.begins, *(len(self.sections),) * span.ends}
        outputs = [output for output in returned if section_of.get(output.value, -1) in made]
        changed = [buffer for buffer in buffers if section_of.get(buffer.value, -1) in made]
        run = (node for section in self.sections[span.start : span.stop] for node in self.graph.section_nodes(section))
        return replace(
            span,
            draws=any(OPERATORS[node.operator].draws_random_numbers for node in run),
            outputs=[(output.symbol, register(output.value)) for output in outputs],
            changed=[(self.tensor_of(b.symbol), register(b.symbol), register(b.value)) for b in changed],
        )

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a pass advances torch's generator."""
        return any(span.draws for span in self._spans[None])

    @property
    def input_gradients(self) -> frozenset[str]:
        """The outputs of the backward."""
        return frozenset(symbol for span in self._spans[ActionKind.BACKWARD] for symbol, _ in span.outputs)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has run whose activations are still kept."""
        return bool(self._of_micro_batch)

    def run(
        self,
        tangent: Tangent = None,
        batches: Sequence[Batch] = IN_MEMORY,
        seed: Callable[[int], None] | None = None,
        *,
        accumulate: bool = False,
        last: bool = False,
        overlapping: Sequence[WindowReduce] = (),
        only: ActionKind | None = None,
    ) -> Steps[list[dict[str, Tensor]]]:
        """Run a pass, or one kind of its actions `only`. Returns the outputs of each micro-batch, by symbol, in
        the order in which they begin. `tangent`: what the backward starts from; `seed` sets the generator of random
        numbers for a micro-batch; `accumulate`: add to the gradients; `last`: the update comes next, with communication
        that is `overlapping` with this pass. Raises DataError for values of the data."""
        outputs: dict[int, dict[str, Tensor]] = {}
        started = self._of_micro_batch
        for span in self._spans[only]:
            number = span.micro_batch
            if span.begins:
                live = self._registers.initial.copy()
                if self._takes_batches:
                    for name, tensor in batches[number].items():
                        if name in self._registers:
                            live[self._registers.value(name)] = tensor
                if not span.ends:
                    started[number] = live
            elif number in started:
                live = started[number]
            else:
                raise InternalError("a backward without a forward before it")
            self._live = live
            for name, register in self._tangents.items():
                live[register] = tangent[name] if type(tangent) is dict else tangent
            if self._takes_batches:
                for buffer, before, _ in span.changed:
                    live[before] = buffer.clone()  # the next micro-batch changes it before the backward
            if span.draws and seed is not None:
                seed(number)
            adds, ends_step = accumulate or number > 0, last and number == len(batches) - 1
            self._overlapping = overlapping if ends_step and self._keeps_order else ()
            reports = self.observer is not None or bool(self._overlapping)
            start, stop = self._nodes_before[span.start], self._nodes_before[span.stop]
            code = self._code[start, stop, adds, ends_step, reports]
            if reports:
                self._next_unit(start)
                self._began_ns = perf_counter_ns()
            yield from code.run(live, self._ended, self._held_inputs)
            self._take(span.outputs, live, outputs.setdefault(number, {}))
            for buffer, _, after in span.changed:
                buffer.copy_(live[after])
            if span.ends:
                started.pop(number, None)
                for register, gradient in self._given_gradients:
                    (gradient.add_ if adds else gradient.copy_)(live[register])
                if self._code.is_watching and not adds:
                    self._code.end_watching()
        self._live = []
        return [*outputs.values()]

    def present(self, value: str) -> Tensor | None:
        """The tensor of the graph's `value` during a pass; None before it is computed and after it is freed."""
        held = self._live[self._registers.value(value)] if self._live and value in self._registers else None
        return held if isinstance(held, Tensor) else None

    def _ended(self, unit: Unit) -> None:
        if self.observer is not None and unit.sections:
            self.observer.sections_end(self._rank, unit.sections, self._began_ns)
        ended_ns = perf_counter_ns()
        for overlapped in self._overlapping:
            overlapped.nodes_done(unit.stop)
        self._next_unit(unit.stop)
        # What took its time between parts of a section is not the section's.
        self._began_ns = perf_counter_ns() - (0 if unit.sections else ended_ns - self._began_ns)

    def _next_unit(self, count: int) -> None:
        """That after `count` nodes begins."""
        for overlapped in self._overlapping:
            overlapped.nodes_begin(self._next_end.get(count, count))

    def _take(self, places: Sequence[tuple[str, int]], live: Registers, outputs: dict[str, Tensor]) -> None:
        """Add the tensors at `places` to `outputs`; copied if they share memory with a symbol."""
        shares_memory = self._shares_memory
        for symbol, register in places:
            value = live[register]
            if register not in shares_memory:  # an operator returns a view in every pass or in none
                shares_memory[register] = storage_of(value) in self._kept_storages
            outputs[symbol] = value.clone() if shares_memory[register] else value

    def _held_inputs(self) -> list[tuple[Symbol, Tensor]]:
        held = [(symbol, self.present(symbol.name)) for symbol in self._inputs.values()]
        return [(symbol, self.tensor_of(symbol.name) if tensor is None else tensor) for symbol, tensor in held]


def tangent_of(program: Program, scale: float) -> Tensor | None:
    if program.loss is None:
        return None
    type_ = program.symbols[program.loss].type
    return torch.full(type_.shape, scale, dtype=getattr(torch, type_.dtype))


def outputs_in_order(graph: Graph, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [outputs[output.symbol] for output in graph.outputs if output.symbol in outputs]
