"""Executes a graph on one rank's device memory: its pass (forward and backward) and its update.

Sections are flat lists of instructions over registers. Registers of symbols hold views of device memory; a gradient is
stored in its group as soon as it is complete. Execution is a generator, which yields only where it must wait for
another rank that this process runs (emulation).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from sambasim.errors import InternalError, OptionError, SambasimError
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Node, Output, Section, SectionKind, node_references
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.straight_line import (
    Misfit,
    PassLines,
    StraightLine,
    by_part,
    merged,
    misfit,
    operator_error,
)
from sambasim.runtime.handlers import Binding
from sambasim.runtime.instructions import Instruction, RegisterFile, Registers
from sambasim.runtime.lowering import lower, lower_update
from sambasim.runtime.observer import StepObserver
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.transports.base import EndOfStep, Overlapped, Transport
from sambasim.runtime.transports.in_process import finished

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import; plain runs do without

R = TypeVar("R")

Steps: TypeAlias = Generator[None, None, R]
"""An execution that yields whenever it waits for another rank of this process."""

Tangent: TypeAlias = Tensor | dict[str, Tensor] | None
"""The gradient that a backward starts from: of the loss, or by symbol, of several outputs."""


_UNBOUND = "an update of a graph without a transport or optimizers"


class Updated(NamedTuple):
    """The results of an update: the losses of all replicas, the largest request, the norm of the gradients before
    clipping (or None), the seconds of communication after the pass ended and during it, when it began, and whether it
    was applied, not skipped."""

    losses: Sequence[float]
    request: int
    norm: float | None
    exposed_s: float
    hidden_s: float
    began_ns: int
    applied: bool = True


class Executor:
    """One graph bound to tensors. `tensor_of`: the tensor of every symbol, always the same one. `engine`: compiles the
    pass; None calls torch's operators one by one. `wanted`: the symbol of the only output that a pass returns; None for
    all."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        tensor_of: Callable[[str], Tensor],
        engine: "Inductor | None" = None,
        wanted: str | None = None,
        *,
        transport: Transport | None = None,
        optimizers: Optimizers | None = None,
        replica: int = 0,
        observer: StepObserver | None = None,
    ) -> None:
        self._program = program
        self._graph = graph
        self._tensor_of = tensor_of
        self._transport = transport
        self._optimizers = optimizers
        self._replica = replica
        self._observer: StepObserver | None = None
        self._wanted = wanted
        self._bind_pass(graph, engine, observer)
        self._update: list[StraightLine] = []
        self._observed_update: list[StraightLine] = []  # in more parts, so that each section is reported
        self._overlapped: list[Overlapped] = []
        self._end: EndOfStep | None = None
        self._norm: int | None = None
        self._update_registers = RegisterFile()
        if self._transport is not None and self._optimizers is not None:
            self.bind_update(self._transport, self._optimizers)

    def _changed_buffers(self, buffers: Sequence[Output]) -> Mapping[int, Sequence[tuple[int, int, Tensor]]]:
        """For each stage, the buffers that its forward changes: the registers with their values before and after."""
        register, found = self._registers.value, defaultdict(list)
        for section in self._pass_sections:
            made = {name for node in self._graph.section_nodes(section) for name in node.results}
            for one in buffers:
                if one.value in made:
                    buffer = self._tensor_of(one.symbol)
                    found[section.stage].append((register(one.symbol), register(one.value), buffer))
        return found

    def _read_twice(self, nodes: Sequence[Node]) -> set[str]:
        """Values that are kept until a micro-batch ends: with several stages of split backwards, no order of sections
        is that of all micro-batches."""
        schedule = self._program.schedule
        if schedule is None or not schedule.splits_backward or schedule.stages == schedule.ranks:
            return set()
        return {name for node in nodes for name in node_references(node)}

    def replace_pass(self, graph: Graph) -> None:
        self._bind_pass(graph)

    def _bind_pass(self, graph: Graph, engine: "Inductor | None" = None, observer: StepObserver | None = None) -> None:
        program, tensor_of = self._program, self._tensor_of
        self._graph = graph
        self._registers = RegisterFile()
        kinds = {name: symbol.kind for name, symbol in program.symbols.items()}
        tangents = [name for name in graph.inputs if kinds[name] is SymbolKind.TANGENT]
        self._tangents = {name: self._registers.value(name) for name in tangents}
        schedule = program.schedule if graph is program.training else None
        changed = {one.symbol for one in graph.outputs if kinds[one.symbol] is SymbolKind.BUFFER}
        by_micro_batch = {name for name in graph.inputs if kinds[name] is SymbolKind.INPUT} | changed
        not_yet = {*tangents, *(by_micro_batch if schedule is not None else ())}
        for name in graph.inputs:
            number = self._registers.value(name)
            if name not in not_yet:
                self._registers.initial[number] = tensor_of(name)
        computed = set(graph.values)
        gradients = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.GRADIENT]
        buffers = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.BUFFER]
        outputs = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.OUTPUT]
        returned = [o for o in outputs if self._wanted in (None, o.symbol)]
        self._pass_sections, self._update_sections = pass_and_update(graph)
        backward = [graph.section_nodes(one) for one in self._pass_sections if one.kind is SectionKind.BCKWD]
        late = {result for nodes in backward for node in nodes for result in node.results} | set(tangents)
        register = self._registers.value
        self._buffers = [(register(o.value), tensor_of(o.symbol)) for o in buffers]
        self._returned = [(o.symbol, register(o.value)) for o in returned]
        self._of_forward = [(o.symbol, register(o.value)) for o in returned if o.value not in late]
        self._of_backward = [(o.symbol, register(o.value)) for o in returned if o.value in late]  # gradients of inputs
        # A gradient may be an input itself (if the loss is a bare parameter): then no node completes it.
        self._kept_storages = {
            tensor.untyped_storage().data_ptr() for tensor in self._registers.initial if isinstance(tensor, Tensor)
        }
        self._from_inputs = [(register(o.value), tensor_of(o.symbol)) for o in gradients if o.value not in computed]
        self._live: Registers = []
        stores: dict[str, list[Tensor]] = {}
        for output in gradients:
            if output.value in computed:
                stores.setdefault(output.value, []).append(tensor_of(output.symbol))
        binding = Binding(self._registers, graph.values, stores, self._transport, self._optimizers)
        nodes = [node for section in self._pass_sections for node in graph.section_nodes(section)]
        sizes = [(section.kind, section.stop - section.start) for section in self._pass_sections]
        # Gradients are stored at once; only outputs and changed buffers are needed at the end of the pass.
        keep = {output.value for output in (*returned, *buffers)} | self._read_twice(nodes)
        lowered = lower(nodes, binding, keep)
        if observer is not None:
            lowered = [
                None if one is None else replace(one, function=observer.bind(self._replica, one)) for one in lowered
            ]
        if engine is None:
            parts = by_part(lowered, [(1, size) for _, size in sizes])
        elif any(node.operator.startswith("comm.") for node in nodes):
            what = "inductor cannot compile a pass that communicates"
            raise OptionError(what, remedy="run it with --engine plain")
        else:
            parts = engine.lower(lowered, nodes, sizes, self._registers, stores, keep, self._tensors())
        # With several stages of split backwards, no order of sections is that of every micro-batch.
        self._in_order = schedule is None or schedule.stages == schedule.ranks or not schedule.splits_backward
        one_by_one = schedule is None or (schedule.stages == schedule.ranks and not schedule.splits_backward)
        self._pass = PassLines(parts, stores, keep, watches=one_by_one)
        self._draws = any(OPERATORS[node.operator].draws_random_numbers for node in nodes)
        self._spans = {} if schedule is None else _spans(self._pass_sections)
        self._changed = {} if schedule is None else self._changed_buffers(buffers)
        forward_sections = sum(section.kind is SectionKind.FWD for section in self._pass_sections)
        self._forward_parts = sum(part.sections <= forward_sections for part in parts)

    def bind_update(self, transport: Transport, optimizers: Optimizers) -> None:
        """Bind the update of a graph that was created without transport and optimizers."""
        self._transport, self._optimizers = transport, optimizers
        transport.observer = self._observer
        registers = self._update_registers = RegisterFile()
        binding = Binding(registers, self._graph.values, {}, transport, optimizers)
        parts = lower_update(self._graph, self._update_sections, binding)
        self._observed_update = [StraightLine(part, accumulate=False) for part in parts]
        self._update = [StraightLine(part, accumulate=False) for part in merged(parts)]
        self._overlapped = [one.communication for one in self._update if isinstance(one.communication, Overlapped)]
        self._end = transport.end_step()
        norms = [node.results[0] for node in self._graph.nodes if node.operator == "opt.total_norm"]
        self._norm = registers.value(norms[0]) if norms and norms[0] else None

    def observe(self, observer: StepObserver | None) -> None:
        self._observer = observer
        if self._transport is not None:
            self._transport.observer = observer

    def run(self, tangent: Tangent = None, *, accumulate: bool = False) -> dict[str, Tensor]:
        """`run_pass`, for a rank that is alone in its process."""
        return finished(self.run_pass(tangent, accumulate=accumulate))

    def run_pass(
        self, tangent: Tangent = None, *, accumulate: bool = False, last: bool = False
    ) -> Steps[dict[str, Tensor]]:
        """Run all sections of the pass in order; returns the outputs by symbol. Raises DataError for values of the
        data. `tangent`: what the backward starts from; `accumulate`: add to the gradients; `last`: the update comes
        next."""
        self._live = self._registers.initial.copy()
        self._set_tangents(tangent)
        lines, overlapped = self._pass.adding if accumulate else self._pass.writing, self._overlapped if last else ()
        chosen = lines.whole if self._observer is None and not overlapped else lines.by_section
        yield from self._run(chosen, 0, self._live, overlapped)
        outputs = self._outputs(self._returned)
        if self._buffers:
            self._keep_buffers()
        self._end_pass(accumulate)
        return outputs

    def run_schedule(
        self,
        actions: Sequence[Action],
        batches: Sequence[Mapping[str, Tensor]],
        tangent: Tangent,
        seed: Callable[[int], None],
        *,
        accumulate: bool = False,
        last: bool = False,
    ) -> Steps[list[dict[str, Tensor]]]:
        """Run `actions` on micro-batches, the inputs of which are `batches`; returns the outputs of each. `seed` sets
        the generator of random numbers for a micro-batch; `accumulate` and `last` are those of `run_pass`."""
        lives: dict[int, Registers] = {}
        outputs: list[dict[str, Tensor]] = [{} for _ in batches]
        left = Counter(action.micro_batch for action in actions)
        for action in actions:
            number = action.micro_batch
            live = self._live = lives.get(number) or self._begin_micro_batch(batches[number], tangent)
            lives[number] = live
            changed = self._changed.get(action.stage, ()) if action.kind is ActionKind.FORWARD else ()
            for before, _, buffer in changed:
                live[before] = buffer.clone()  # the next micro-batch may change it before this one's backward
            if self._draws:
                seed(number)
            start, stop = self._spans[action.kind, action.stage]
            adds, is_last = accumulate or number > 0, last and number == len(batches) - 1
            lines = self._pass.adding if adds else self._pass.writing
            overlapped = self._overlapped if is_last and self._in_order else ()
            whole = self._observer is None and not overlapped
            yield from self._run(lines.of_sections(start, stop, whole=whole), start, live, overlapped)
            if action.kind is ActionKind.FORWARD:
                outputs[number] |= self._outputs([one for one in self._of_forward if live[one[1]] is not None])
                for _, after, buffer in changed:
                    buffer.copy_(self._value(after))
            left[number] -= 1
            if not left[number]:
                del lives[number]
        self._live = []
        if self._pass.is_watching and not accumulate:
            self._pass.end_watching()
        return outputs

    def _begin_micro_batch(self, batch: Mapping[str, Tensor], tangent: Tangent) -> Registers:
        self._live = live = self._registers.initial.copy()
        for name, tensor in batch.items():
            if self._registers.has(name):
                live[self._registers.value(name)] = tensor
        self._set_tangents(tangent)
        return live

    def forward(self) -> dict[str, Tensor]:
        """Run the forward sections only, as `run_pass`. Activations are kept until `backward` or the next pass."""
        self._live = self._registers.initial.copy()
        finished(self._run(self._pass.writing.by_section[: self._forward_parts], 0, self._live))
        outputs = self._outputs(self._of_forward)
        self._keep_buffers()
        return outputs

    def backward(self, tangent: Tangent, *, accumulate: bool) -> dict[str, Tensor]:
        """Run the backward sections after `forward`; returns the gradients of inputs that require one, by symbol."""
        if not self._live:
            raise InternalError("a backward without a forward before it")
        self._set_tangents(tangent)
        lines = (self._pass.adding if accumulate else self._pass.writing).by_section
        first = lines[self._forward_parts - 1].sections if self._forward_parts else 0
        finished(self._run(lines[self._forward_parts :], first, self._live))
        outputs = self._outputs(self._of_backward)
        self._end_pass(accumulate)
        return outputs

    def begin_step(self, number: int, rate: float) -> None:
        """Begin optimizer step `number` (from 1), before its last pass. Returns when gradients may be overwritten."""
        transport, optimizers = self._transport, self._optimizers
        if transport is None or optimizers is None:
            raise InternalError(_UNBOUND)
        optimizers.begin(number, rate)
        transport.wait_for_readers()
        for one in self._overlapped:
            one.begin_step()

    def update(self, losses: Sequence[float], request: int = 0) -> Steps[Updated]:
        """Run the update sections; afterwards every replica has the parameters of the next step. `losses`: of this
        rank's replica; `request`: what this rank asks of the run."""
        return self._end_step(self._update if self._observer is None else self._observed_update, losses, request)

    def exchange(self, losses: Sequence[float], request: int) -> Steps[Updated]:
        """Exchange losses and requests, as at the end of `update`, and nothing else."""
        return self._end_step((), losses, request)

    def _end_step(self, update: Sequence[StraightLine], losses: Sequence[float], request: int) -> Steps[Updated]:
        transport, end = self._transport, self._end
        if transport is None or end is None:
            raise InternalError(_UNBOUND)
        began_ns, hidden_s = perf_counter_ns(), 0.0
        transport.offer(losses, request)
        for one in self._overlapped:
            hidden_s += one.hidden_s
        live = self._update_registers.initial.copy()
        exposed_s = yield from self._run(update, len(self._pass_sections), live)
        began_s = perf_counter()
        end.begin()
        if not end.is_ready():
            exposed_s += perf_counter() - began_s
            while not end.is_ready():
                yield
            began_s = perf_counter()
        shared = end.finish()
        exposed_s += perf_counter() - began_s
        norm = None if self._norm is None else live[self._norm]
        norm = norm if isinstance(norm, float) else None
        return Updated(shared.losses, shared.request, norm, exposed_s, hidden_s, began_ns)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has run whose activations are still kept."""
        return bool(self._live)

    def present(self, value: str) -> Tensor | None:
        """The tensor of the graph's `value` during a pass; None before it is computed and after it is freed."""
        held = self._live[self._registers.value(value)] if self._live and self._registers.has(value) else None
        return held if isinstance(held, Tensor) else None

    def _set_tangents(self, tangent: Tangent) -> None:
        for name, register in self._tangents.items():
            self._live[register] = tangent[name] if type(tangent) is dict else tangent

    def _run(
        self, lines: Sequence[StraightLine], done: int, live: Registers, overlapped: Sequence[Overlapped] = ()
    ) -> Steps[float]:
        """Run `lines`, after `done` sections. Returns the seconds spent in communication."""
        observer, exposed_s = self._observer, 0.0
        began_ns = perf_counter_ns() if observer is not None else 0
        for line in lines:
            communication, function = line.communication, line.function or line.compile()
            try:
                if communication is None:
                    function(live)
                else:
                    began_s = perf_counter()
                    communication.begin(*[live[operand] for operand in line.operands])
                    if not communication.is_ready():
                        exposed_s += perf_counter() - began_s
                        while not communication.is_ready():
                            yield
                        began_s = perf_counter()
                    function(live)
                    exposed_s += perf_counter() - began_s - communication.update_s
            except Misfit as error:
                raise misfit(line.failed(error)) from error
            except SambasimError:
                raise
            except Exception as error:
                raise self._failure(line.failed(error), error) from error
            count = line.sections
            if count == done:
                continue
            if observer is not None:
                observer.sections_end(self._replica, self._graph.sections[done:count], began_ns)
            for one in overlapped:
                one.section_done(count)
            done = count
            if observer is not None:
                began_ns = perf_counter_ns()
        return exposed_s

    def _failure(self, instruction: Instruction, error: Exception) -> SambasimError:
        if instruction.node.operator.startswith(("comm.", "opt.")) and not isinstance(error, MemoryError):
            raise error  # its operands are ours: values of the inputs are not to blame
        inputs = [self._program.symbols[name] for name in self._graph.inputs]
        inputs = [symbol for symbol in inputs if symbol.kind is SymbolKind.INPUT]
        held = {symbol.name: self.present(symbol.name) for symbol in inputs}
        tensors = {name: self._tensor_of(name) if tensor is None else tensor for name, tensor in held.items()}
        return operator_error(instruction.node, error, inputs, tensors)

    def _outputs(self, outputs: Sequence[tuple[str, int]]) -> dict[str, Tensor]:
        """The tensors of outputs, by symbol and register; copied if they share memory with a symbol."""
        found = {}
        for symbol, register in outputs:
            value = self._value(register)
            is_kept = value.untyped_storage().data_ptr() in self._kept_storages
            found[symbol] = value.clone() if is_kept else value
        return found

    def _keep_buffers(self) -> None:
        for register, destination in self._buffers:
            destination.copy_(self._value(register))

    def _end_pass(self, accumulate: bool) -> None:
        for register, destination in self._from_inputs:
            if accumulate:
                destination.add_(self._value(register))
            else:
                destination.copy_(self._value(register))
        self._live = []
        if self._pass.is_watching and not accumulate:
            self._pass.end_watching()

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of the graph's inputs by symbol, with an uninitialized one for each tangent."""
        symbols = self._program.symbols
        tangents = {name: symbols[name].type for name in self._graph.inputs if symbols[name].kind is SymbolKind.TANGENT}
        like = {name: torch.empty(type_.shape, dtype=getattr(torch, type_.dtype)) for name, type_ in tangents.items()}
        return like | {name: self._tensor_of(name) for name in self._graph.inputs if name not in like}

    def _value(self, register: int) -> Tensor:
        value = self._live[register]
        if not isinstance(value, Tensor):
            raise TypeError(f"register {register} holds a {type(value).__name__}")
        return value


def _spans(sections: Sequence[Section]) -> Mapping[tuple[ActionKind, int], tuple[int, int]]:
    """The range of sections that each kind of action runs, by stage; an empty one where there are none."""
    found: dict[tuple[ActionKind, int], tuple[int, int]] = defaultdict(lambda: (0, 0))

    def add(kind: ActionKind, section: Section) -> None:
        start, _ = found.get((kind, section.stage), (section.index, section.index))
        found[kind, section.stage] = start, section.index + 1

    for section in sections:
        if section.kind is SectionKind.FWD:
            add(ActionKind.FORWARD, section)
        else:
            add(ActionKind.BACKWARD, section)
            add(ActionKind.WEIGHT_GRADIENTS if section.weights_only else ActionKind.INPUT_GRADIENTS, section)
    return found


def tangent_of(program: Program, scale: float) -> Tensor | None:
    if program.loss is None:
        return None
    type_ = program.symbols[program.loss].type
    return torch.full(type_.shape, scale, dtype=getattr(torch, type_.dtype))


def outputs_in_order(graph: Graph, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [outputs[output.symbol] for output in graph.outputs if output.symbol in outputs]
