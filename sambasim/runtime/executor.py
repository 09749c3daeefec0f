"""Execute a graph against one rank's device memory: its pass, and its update.

Sections are flat lists of instructions over registers. Symbols are in their registers for good, as views of device
memory; activations come and go. A gradient is stored in its place in the group as soon as it is complete: written by
the first micro-step of an accumulation, added to by the others.

Execution is a generator: it yields where it must wait for another rank of this process, and nowhere else.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from sambasim.errors import InternalError, SambasimError
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Output, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.straight_line import Misfit, PassLines, StraightLine, by_part, misfit
from sambasim.runtime.handlers import Binding
from sambasim.runtime.instructions import Instruction, RegisterFile, Registers
from sambasim.runtime.lowering import lower, lower_update
from sambasim.runtime.observer import StepObserver
from sambasim.runtime.operator_failure import operator_error
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.transports.base import Communication, Overlapped, Shared, Transport

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import; plain runs do without

R = TypeVar("R")

Steps: TypeAlias = Generator[None, None, R]
"""What is executed until it waits for another rank of this process, and then goes on."""

Tangent: TypeAlias = Tensor | dict[str, Tensor] | None
"""What a backward starts from: the gradient of the loss, or, by symbol, those of several outputs."""


class Updated(NamedTuple):
    """What came of an update.

    losses: of all replicas, in rank order
    request: the largest request of a rank
    norm: of the mean gradients before they were clipped; None for a program that does not clip
    exposed_s: seconds in communication after this rank's own pass had ended, waiting for other processes included
    hidden_s: seconds in communication before that, beside the pass
    """

    losses: Sequence[float]
    request: int
    norm: float | None
    exposed_s: float
    hidden_s: float


def finished(steps: Steps[R]) -> R:
    """The result of `steps` of a rank that is alone in its process. Raises InternalError if they wait for another."""
    try:
        next(steps)
    except StopIteration as end:
        result: R = end.value
        return result
    raise InternalError("the program waits for a rank that does not run in this process")


class Executor:
    """One graph bound to tensors. `tensor_of` gives the tensor of every symbol that the graph reads or keeps: always
    the same one, whose contents may change between passes.

    transport, optimizers: carry out communication and updates; a graph that only computes needs neither
    engine: compiles the pass here, before it is run; None runs its operators as they are
    wanted: the output that a pass returns, by symbol; None for all of them
    observer: binds each instruction of the pass; `observe` attaches one to what happens

    Raises PefError for a node that this torch cannot carry out, and MachineError if the graph cannot be compiled.
    """

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
        self._registers = RegisterFile()
        kinds = {name: symbol.kind for name, symbol in program.symbols.items()}
        tangents = [name for name in graph.inputs if kinds[name] is SymbolKind.TANGENT]
        self._tangents = {name: self._registers.value(name) for name in tangents}
        for name in graph.inputs:
            number = self._registers.value(name)
            if kinds[name] is not SymbolKind.TANGENT:
                self._registers.initial[number] = tensor_of(name)
        computed = set(graph.values)
        gradients = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.GRADIENT]
        self._buffers = [(o, tensor_of(o.symbol)) for o in graph.outputs if kinds[o.symbol] is SymbolKind.BUFFER]
        outputs = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.OUTPUT]
        self._handed_out = [o for o in outputs if wanted in (None, o.symbol)]
        self._pass_sections, self._update_sections = pass_and_update(graph)
        backward = [graph.section_nodes(one) for one in self._pass_sections if one.kind is SectionKind.BCKWD]
        late = {result for nodes in backward for node in nodes for result in node.results} | set(tangents)
        self._of_forward = [o for o in self._handed_out if o.value not in late]
        self._of_backward = [o for o in self._handed_out if o.value in late]  # gradients of inputs
        # A gradient may be an input itself (of a bare parameter that is the loss, say): then no node completes it.
        self._kept_storages = {
            tensor.untyped_storage().data_ptr() for tensor in self._registers.initial if isinstance(tensor, Tensor)
        }
        self._late = [(o, tensor_of(o.symbol)) for o in gradients if o.value not in computed]
        self._live: Registers = []
        self._bind(engine, [o for o in gradients if o.value in computed], observer)

    def _bind(self, engine: "Inductor | None", gradients: Sequence[Output], observer: StepObserver | None) -> None:
        graph = self._graph
        stores: dict[str, list[Tensor]] = {}
        for output in gradients:
            stores.setdefault(output.value, []).append(self._tensor_of(output.symbol))
        binding = Binding(self._registers, graph.values, stores, self._transport, self._optimizers)
        nodes = [node for section in self._pass_sections for node in graph.section_nodes(section)]
        sizes = [(section.kind, section.stop - section.start) for section in self._pass_sections]
        # Gradients are stored at once, so the pass's end needs only what it hands out and the changed buffers.
        keep = {output.value for output in self._handed_out} | {output.value for output, _ in self._buffers}
        lowered = lower(nodes, binding, keep)
        if observer is not None:
            lowered = [
                None if one is None else replace(one, function=observer.bind(self._replica, one)) for one in lowered
            ]
        if engine is None:
            parts = by_part(lowered, [(1, size) for _, size in sizes])
        else:
            parts = engine.lower(lowered, nodes, sizes, self._registers, stores, keep, self._tensors())
        self._pass = PassLines(parts, stores, keep)
        forward_sections = sum(section.kind is SectionKind.FWD for section in self._pass_sections)
        self._forward_parts = sum(part.sections <= forward_sections for part in parts)
        self._update: list[StraightLine] = []
        self._overlapped: list[Overlapped] = []
        self._end: Communication | None = None
        self._norm: int | None = None
        self._update_registers = RegisterFile()
        if self._transport is not None and self._optimizers is not None:
            self.bind_update(self._transport, self._optimizers)

    def bind_update(self, transport: Transport, optimizers: Optimizers) -> None:
        """From now on, updates are carried out by these. A graph that was bound without them is given them once."""
        self._transport, self._optimizers = transport, optimizers
        transport.observer = self._observer
        registers = self._update_registers = RegisterFile()
        binding = Binding(registers, self._graph.values, {}, transport, optimizers)
        parts = lower_update(self._graph, self._update_sections, binding)
        self._update = [StraightLine(part, accumulate=False) for part in parts]
        self._overlapped = [one.communication for one in self._update if isinstance(one.communication, Overlapped)]
        self._end = transport.end_step()
        norms = [node.results[0] for node in self._graph.nodes if node.operator == "opt.total_norm"]
        self._norm = registers.value(norms[0]) if norms and norms[0] else None

    def observe(self, observer: StepObserver | None) -> None:
        """From now on, report to `observer`; to nobody, if it is None."""
        self._observer = observer
        if self._transport is not None:
            self._transport.observer = observer

    def run(self, tangent: Tangent = None, *, accumulate: bool = False) -> dict[str, Tensor]:
        """One pass of a rank that is alone in its process: `passed`, all at once."""
        return finished(self.passed(tangent, accumulate=accumulate))

    def passed(
        self, tangent: Tangent = None, *, accumulate: bool = False, last: bool = False
    ) -> Steps[dict[str, Tensor]]:
        """All sections of the pass in order, the backward starting from `tangent`; returns the outputs by symbol.

        With `accumulate`, gradients are added to those that are there instead of overwriting them. `last` says that the
        update comes next, so that communication may go on beside the pass. Raises DataError if an operator fails on the
        values of the inputs, MachineError if memory runs out, and PefError if an operator returns a list of another
        length than its node states.
        """
        self._live = self._registers.initial.copy()
        self._begin_from(tangent)
        yield from self._run(self._pass.adding if accumulate else self._pass.writing, 0, self._live, overlap=last)
        outputs = self._outputs(self._handed_out)
        self._keep_buffers()
        self._end_pass(accumulate)
        return outputs

    def forward(self) -> dict[str, Tensor]:
        """The forward sections alone; returns the outputs by symbol. Raises what `passed` does.

        Buffers are changed at the end of it. Activations are kept until `backward`, or until the next pass begins.
        """
        self._live = self._registers.initial.copy()
        finished(self._run(self._pass.writing[: self._forward_parts], 0, self._live))
        outputs = self._outputs(self._of_forward)
        self._keep_buffers()
        return outputs

    def backward(self, tangent: Tangent, *, accumulate: bool) -> dict[str, Tensor]:
        """The backward sections, from `tangent`, of the pass whose `forward` was last; returns the gradients of inputs
        that require one, by symbol. Raises what `passed` does."""
        if not self._live:
            raise InternalError("a backward without a forward before it")
        self._begin_from(tangent)
        lines = self._pass.adding if accumulate else self._pass.writing
        first = lines[self._forward_parts - 1].sections if self._forward_parts else 0
        finished(self._run(lines[self._forward_parts :], first, self._live))
        outputs = self._outputs(self._of_backward)
        self._end_pass(accumulate)
        return outputs

    def begin_step(self, number: int, rate: float) -> None:
        """Optimizer step `number`, which counts from 1, begins, and its last pass is still to come. `rate` multiplies
        the learning rates. Returns when gradients may be overwritten."""
        transport, optimizers = self._bound_update()
        optimizers.begin(number, rate)
        transport.wait_for_readers()
        for one in self._overlapped:
            one.begin_step()

    def updated(self, losses: Sequence[float], request: int = 0) -> Steps[Updated]:
        """The update: gradients are complete here; afterwards, the parameters of every replica are those of the next
        step. `losses` are those of this rank's replica, `request` is what it asks of the run."""
        transport, _ = self._bound_update()
        transport.offer(losses, request)
        hidden_s = sum(one.hidden_s for one in self._overlapped)
        live = self._update_registers.initial.copy()
        exposed_s = yield from self._run(self._update, len(self._pass_sections), live)
        told = yield from self._end_of_step()
        norm = None if self._norm is None else live[self._norm]
        return told._replace(
            norm=norm if isinstance(norm, float) else None, exposed_s=told.exposed_s + exposed_s, hidden_s=hidden_s
        )

    def told(self, losses: Sequence[float], request: int) -> Steps[Updated]:
        """What all ranks tell one another at the end of a step, and nothing else: no parameter is updated."""
        transport, _ = self._bound_update()
        transport.offer(losses, request)
        return (yield from self._end_of_step())

    def _end_of_step(self) -> Steps[Updated]:
        end = self._end
        if end is None:
            raise InternalError("the end of a step of a graph that is bound to no transport")
        began_s = time.perf_counter()
        end.begin()
        exposed_s = time.perf_counter() - began_s
        while not end.is_ready():
            yield
        began_s = time.perf_counter()
        shared = end.finish()
        exposed_s += time.perf_counter() - began_s
        if not isinstance(shared, Shared):
            raise InternalError("the end of a step gave no losses")
        return Updated(shared.losses, shared.request, None, exposed_s, 0.0)

    @property
    def awaits_backward(self) -> bool:
        """Whether the activations of a forward are there."""
        return bool(self._live)

    def present(self, value: str) -> Tensor | None:
        """What is called `value` in the graph, while a pass is under way; None if it is not there, or not any more."""
        held = self._live[self._registers.value(value)] if self._live and self._registers.has(value) else None
        return held if isinstance(held, Tensor) else None

    def _bound_update(self) -> tuple[Transport, Optimizers]:
        if self._transport is None or self._optimizers is None:
            raise InternalError("an update of a graph that is bound to no transport")
        return self._transport, self._optimizers

    def _begin_from(self, tangent: Tangent) -> None:
        for name, register in self._tangents.items():
            self._live[register] = tangent[name] if type(tangent) is dict else tangent

    def _run(self, lines: Sequence[StraightLine], done: int, live: Registers, *, overlap: bool = False) -> Steps[float]:
        """Run `lines`; `done` sections have been run before. Returns the seconds of communication among them."""
        observer, exposed_s = self._observer, 0.0
        overlapped = self._overlapped if overlap else ()
        began_ns = perf_counter_ns() if observer is not None else 0
        for line in lines:
            communication = line.communication
            try:
                if communication is None:
                    line(live)
                else:
                    began_s = time.perf_counter()
                    line.begin(live)
                    exposed_s += time.perf_counter() - began_s
                    while not communication.is_ready():
                        yield
                    began_s = time.perf_counter()
                    line(live)
                    exposed_s += time.perf_counter() - began_s - communication.update_s
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
        inputs = [self._program.symbols[name] for name in self._graph.inputs]
        inputs = [symbol for symbol in inputs if symbol.kind is SymbolKind.INPUT]
        tensors = {symbol.name: self._tensor_of(symbol.name) for symbol in inputs}
        return operator_error(instruction.node, error, inputs, tensors)

    def _outputs(self, outputs: Sequence[Output]) -> dict[str, Tensor]:
        return {output.symbol: self._detached(output) for output in outputs}

    def _keep_buffers(self) -> None:
        for output, destination in self._buffers:
            destination.copy_(self._value(output))

    def _end_pass(self, accumulate: bool) -> None:
        for output, destination in self._late:
            if accumulate:
                destination.add_(self._value(output))
            else:
                destination.copy_(self._value(output))
        self._live = []
        if not accumulate:
            self._pass.end_writing_pass()

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that the graph begins from; one like the tangent in its place."""
        symbols = self._program.symbols
        tangents = {name: symbols[name].type for name in self._graph.inputs if symbols[name].kind is SymbolKind.TANGENT}
        like = {name: torch.empty(type_.shape, dtype=getattr(torch, type_.dtype)) for name, type_ in tangents.items()}
        return like | {name: self._tensor_of(name) for name in self._graph.inputs if name not in like}

    def _value(self, output: Output) -> Tensor:
        value = self._live[self._registers.value(output.value)]
        if not isinstance(value, Tensor):
            raise TypeError(f"{output.value} is {type(value).__name__}")
        return value

    def _detached(self, output: Output) -> Tensor:
        """The output's value; a copy where it is a symbol, or a view of one, which the next step will overwrite."""
        value = self._value(output)
        return value.clone() if value.untyped_storage().data_ptr() in self._kept_storages else value


def tangent_of(program: Program, scale: float) -> Tensor | None:
    """What the backward starts from: `scale` in the type of the loss, or None for a program without a loss."""
    if program.loss is None:
        return None
    type_ = program.symbols[program.loss].type
    return torch.full(type_.shape, scale, dtype=getattr(torch, type_.dtype))


def outputs_in_order(graph: Graph, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What a pass handed out, in the order of the graph's outputs."""
    return [outputs[output.symbol] for output in graph.outputs if output.symbol in outputs]
