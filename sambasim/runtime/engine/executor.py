"""Executes a graph on one rank's device memory: its pass (forward and backward) and its update.

Sections are flat lists of instructions over registers. Execution is a generator, which yields only where it must wait
for another rank that this process runs (emulation).
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from sambasim.errors import InternalError, SambasimError
from sambasim.ir.graph import Graph, Node
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind
from sambasim.ir.types import SymbolKind
from sambasim.records.trace import Track
from sambasim.runtime.engine.bound_pass import BoundPass, Tangent, tensor_in
from sambasim.runtime.engine.handlers import Binding
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Registers
from sambasim.runtime.engine.lowering import lower_update
from sambasim.runtime.engine.operator_errors import Misfit, misfit, operator_error
from sambasim.runtime.engine.straight_line import StraightLine, merged, straight_lines
from sambasim.runtime.transports.communication import BYTE_COUNTS, Communication, EndOfStep, Overlapped
from sambasim.runtime.transports.in_process import finished
from sambasim.runtime.transports.transport import Transport
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import Function, StepObserver

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import; plain runs do without

__all__ = ["Executor", "Steps", "Tangent", "Updated", "outputs_in_order", "tangent_of"]

R = TypeVar("R")

Steps: TypeAlias = Generator[None, None, R]
"""An execution that yields whenever it waits for another rank of this process."""

_UNBOUND = "an update of a graph without a transport or optimizers"


class Updated(NamedTuple):
    """The results of an update: the losses of all replicas, the largest request, the norm of the gradients before
    clipping (or None), the seconds of communication after the pass ended and during it, when it began, the seconds that
    the passes of the step waited for communication, by mesh axis, and whether it was applied, not skipped."""

    losses: Sequence[float]
    request: int
    norm: float | None
    exposed_s: float
    hidden_s: float
    began_ns: int
    waited_s: Mapping[str, float]
    applied: bool = True


class Executor:
    """One graph bound to tensors. `tensor_of`: the tensor of every symbol, always the same one. `engine`: compiles the
    pass; None calls torch's operators one by one. `wanted`: the symbol of the only output that a pass returns; None for
    all. `overlaps`: communication may overlap with the backward."""

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
        overlaps: bool = True,
        observer: StepObserver | None = None,
    ) -> None:
        self._program = program
        self._tensor_of = tensor_of
        self._transport = transport
        self._optimizers = optimizers
        self._replica = replica
        self._overlaps = overlaps
        self._observer: StepObserver | None = None
        self._detailed: StepObserver | None = None  # the same, if it wants details
        self._wanted = wanted
        self._live: Registers = []
        self._waited_s: dict[str, float] = {}
        function_of = None if observer is None else partial(observer.bind, replica)
        self._pass = self._bind_pass(graph, engine, function_of)
        self._update: list[StraightLine] = []
        self._observed_update: list[StraightLine] = []  # in more parts, so that each section is reported
        self._overlapped: list[Overlapped] = []
        self._end: EndOfStep | None = None
        self._end_waits = False
        self._norm: int | None = None
        self._update_registers = RegisterFile()
        if self._transport is not None and self._optimizers is not None:
            self.bind_update(self._transport, self._optimizers)

    def replace_pass(self, graph: Graph) -> None:
        self._live = []
        self._pass = self._bind_pass(graph)

    def _bind_pass(
        self,
        graph: Graph,
        engine: "Inductor | None" = None,
        function_of: Callable[[Node, Function], Function] | None = None,
    ) -> BoundPass:
        return BoundPass(
            graph,
            self._program,
            self._tensor_of,
            transport=self._transport,
            optimizers=self._optimizers,
            engine=engine,
            wanted=self._wanted,
            function_of=function_of,
        )

    def bind_update(self, transport: Transport, optimizers: Optimizers) -> None:
        """Bind the update of a graph that was created without transport and optimizers."""
        self._transport, self._optimizers = transport, optimizers
        registers = self._update_registers = RegisterFile()
        binding = Binding(registers, self._pass.graph.values, {}, self._tensor_of, transport, optimizers)
        parts = lower_update(self._pass.graph, self._pass.update_sections, binding)
        sections, done = self._pass.graph.sections, len(self._pass.sections)
        self._observed_update = straight_lines(parts, sections, done)
        self._update = straight_lines(merged(parts), sections, done)
        self._overlapped = [one.communication for one in self._update if isinstance(one.communication, Overlapped)]
        self._end = transport.end
        transport.observe(self._observer)
        self._end_waits = type(self._end).is_ready is not Communication.is_ready
        norms = [node.results[0] for node in self._pass.graph.nodes if node.operator == "opt.total_norm"]
        self._norm = registers.value(norms[0]) if norms and norms[0] else None

    def observe(self, observer: StepObserver | None) -> None:
        self._observer = observer
        self._detailed = observer if observer is not None and observer.detailed else None
        if self._transport is not None:
            self._transport.observe(observer)

    def run(self, tangent: Tangent = None, *, accumulate: bool = False) -> dict[str, Tensor]:
        """`run_pass`, for a rank that is alone in its process."""
        return finished(self.run_pass(tangent, accumulate=accumulate))

    def run_pass(
        self, tangent: Tangent = None, *, accumulate: bool = False, last: bool = False
    ) -> Steps[dict[str, Tensor]]:
        """Run all sections of the pass in order; returns the outputs by symbol. Raises DataError for values of the
        data. `tangent`: what the backward starts from; `accumulate`: add to the gradients; `last`: the update comes
        next."""
        bound = self._pass
        live = self._live = bound.begin(tangent)
        overlapped = self._overlapped if last and self._overlaps else ()
        whole = self._observer is None and not overlapped
        code = bound.lines.adding if accumulate else bound.lines.writing
        lines = code.of_sections(0, len(bound.sections), whole=whole, last=last)
        yield from self._run(lines, live, self._observer, overlapped)
        outputs = bound.outputs(live, bound.returned)
        if bound.ends_with_work:
            bound.store_buffers(live)
            bound.end(live, accumulate=accumulate)
        self._live = []
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
        bound = self._pass
        lives: dict[int, Registers] = {}
        outputs: list[dict[str, Tensor]] = [{} for _ in batches]
        left = Counter(action.micro_batch for action in actions)
        for action in actions:
            number, is_forward = action.micro_batch, action.kind is ActionKind.FORWARD
            if number not in lives:
                lives[number] = bound.begin_micro_batch(tangent, batches[number])
            live = self._live = lives[number]
            changed = bound.changed.get(action.stage, ()) if is_forward else ()
            for one in changed:
                live[one.before] = one.buffer.clone()  # another micro-batch may change it before this one's backward
            if bound.draws_random_numbers:
                seed(number)
            start, stop = bound.spans[action.kind, action.stage]
            ends = last and number == len(batches) - 1
            overlapped = self._overlapped if ends and self._overlaps and bound.keeps_order else ()
            whole = self._observer is None and not overlapped
            code = bound.lines.adding if accumulate or number > 0 else bound.lines.writing
            lines = code.of_sections(start, stop, whole=whole, last=ends)
            yield from self._run(lines, live, self._observer, overlapped)
            if is_forward:
                found = [place for place in bound.of_forward if live[place.register] is not None]
                outputs[number] |= bound.outputs(live, found)
            for one in changed:
                one.buffer.copy_(tensor_in(live, one.after))
            left[number] -= 1
            if not left[number]:
                del lives[number]
        self._live = []
        bound.record_direct_writes(accumulate=accumulate)
        return outputs

    def forward(self) -> Steps[dict[str, Tensor]]:
        """Run the forward sections only, as `run_pass`. Activations are kept until `backward` or the next pass."""
        bound = self._pass
        live = self._live = bound.begin(None)
        yield from self._run(bound.lines.writing.of_sections(0, bound.forward_sections), live, self._observer)
        outputs = bound.outputs(live, bound.of_forward)
        bound.store_buffers(live)
        return outputs

    def backward(self, tangent: Tangent, *, accumulate: bool) -> Steps[dict[str, Tensor]]:
        """Run the backward sections after `forward`; returns the gradients of inputs that require one, by symbol."""
        if not self._live:
            raise InternalError("a backward without a forward before it")
        bound, live = self._pass, self._live
        bound.set_tangents(live, tangent)
        code = bound.lines.adding if accumulate else bound.lines.writing
        yield from self._run(code.of_sections(bound.forward_sections, len(bound.sections)), live, self._observer)
        outputs = bound.outputs(live, bound.of_backward)
        bound.end(live, accumulate=accumulate)
        self._live = []
        return outputs

    def begin_step(self, number: int, rate: float, loss_scale: float = 1.0) -> None:
        """Begin optimizer step `number` (from 1), before its last pass. Returns when gradients may be overwritten."""
        transport, optimizers = self._transport, self._optimizers
        if transport is None or optimizers is None:
            raise InternalError(_UNBOUND)
        detailed, began_ns = self._detailed, 0
        if detailed is not None:
            began_ns = perf_counter_ns()
            detailed.span_begins(self._replica, Track.HOST, "begin step")
        optimizers.begin(number, rate, loss_scale)
        transport.sync.wait_for_readers()
        for one in self._overlapped:
            one.begin_step()
        if detailed is not None:
            detailed.span_ends(self._replica, Track.HOST, "begin step", began_ns, {})

    def update(
        self, losses: Sequence[float], request: int = 0, began_ns: int = 0, *, applies: bool = True
    ) -> Steps[Updated]:
        """Run the update sections; afterwards every replica has the parameters of the next step. `losses`: of this
        rank's replica; `request`: what this rank asks of the run; `began_ns`: when the passes ended, to be returned.
        Unless it `applies`, only losses and requests are exchanged."""
        transport, optimizers, end = self._transport, self._optimizers, self._end
        if transport is None or optimizers is None or end is None:
            raise InternalError(_UNBOUND)
        detailed = self._detailed if applies else None
        lines = self._update if detailed is None else self._observed_update
        span_ns, moved = 0, (0, 0, 0, 0)
        if detailed is not None:
            span_ns, moved = perf_counter_ns(), transport.sync.bytes_moved.counts()
            detailed.span_begins(self._replica, Track.HOST, "sync and update")
        hidden_s, norm = 0.0, None
        waited_s, self._waited_s = self._waited_s, {}
        transport.sync.offer(losses, request)
        for one in self._overlapped:
            hidden_s += one.hidden_s
        live = self._update_registers.initial.copy()
        yield from self._run(lines if applies else (), live, detailed)
        exposed_s = 0.0
        if self._waited_s:
            exposed_s, self._waited_s = sum(self._waited_s.values()), {}
        began_s = perf_counter()
        end.begin()
        if self._end_waits and not end.is_ready():
            exposed_s += perf_counter() - began_s
            while not end.is_ready():
                yield
            began_s = perf_counter()
        shared = end.finish()
        exposed_s += perf_counter() - began_s
        applied = True
        if self._norm is not None:
            computed = live[self._norm]
            norm = computed if isinstance(computed, float) else None
            applied = norm is None or not optimizers.skips(norm)
        if detailed is not None:
            counts = zip(BYTE_COUNTS, transport.sync.bytes_moved.counts(), moved, strict=True)
            args = {name: now - before for name, now, before in counts if now != before}
            detailed.span_ends(self._replica, Track.HOST, "sync and update", span_ns, args)
        return Updated(shared.losses, shared.request, norm, exposed_s, hidden_s, began_ns, waited_s, applied)

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a pass advances torch's generator."""
        return self._pass.draws_random_numbers

    @property
    def input_gradients(self) -> frozenset[str]:
        """The outputs of the backward."""
        return frozenset(place.symbol for place in self._pass.of_backward)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has run whose activations are still kept."""
        return bool(self._live)

    def present(self, value: str) -> Tensor | None:
        """The tensor of the graph's `value` during a pass; None before it is computed and after it is freed."""
        held = self._live[self._pass.registers.value(value)] if self._live and self._pass.registers.has(value) else None
        return held if isinstance(held, Tensor) else None

    def _run(
        self,
        lines: Sequence[StraightLine],
        live: Registers,
        observer: StepObserver | None,
        overlapped: Sequence[Overlapped] = (),
    ) -> Steps[None]:
        """Run `lines`; adds the seconds spent in communication to `_waited_s`."""
        is_timed = observer is not None and observer.detailed
        began_ns = perf_counter_ns() if is_timed else 0
        for line in lines:
            communication, function = line.communication, line.function or line.compile()
            try:
                if communication is None:
                    function(live)
                else:
                    spent_s = -perf_counter()
                    if line.begins:
                        communication.begin(*map(live.__getitem__, line.operands))
                    if line.waits and not communication.is_ready():
                        spent_s += perf_counter()
                        while not communication.is_ready():
                            yield
                        spent_s -= perf_counter()
                    function(live)
                    spent_s += perf_counter() - communication.update_s
                    self._waited_s[line.axis] = self._waited_s.get(line.axis, 0.0) + spent_s
            except Misfit as error:
                raise misfit(line.failed(error)) from error
            except SambasimError:
                raise
            except Exception as error:
                raise self._failure(line.failed(error), error) from error
            if not line.ended:
                continue
            if observer is not None:
                observer.sections_end(self._replica, line.ended, began_ns)
            for one in overlapped:
                one.section_done(line.sections)
            if is_timed:
                began_ns = perf_counter_ns()

    def _failure(self, instruction: Instruction, error: Exception) -> SambasimError:
        if instruction.node.operator.startswith(("comm.", "opt.")) and not isinstance(error, MemoryError):
            raise error  # its operands are ours: values of the inputs are not to blame
        inputs = [self._program.symbols[name] for name in self._pass.graph.inputs]
        inputs = [symbol for symbol in inputs if symbol.kind is SymbolKind.INPUT]
        held = {symbol.name: self.present(symbol.name) for symbol in inputs}
        tensors = {name: self._tensor_of(name) if tensor is None else tensor for name, tensor in held.items()}
        return operator_error(instruction.node, error, inputs, tensors)


def tangent_of(program: Program, scale: float) -> Tensor | None:
    if program.loss is None:
        return None
    type_ = program.symbols[program.loss].type
    return torch.full(type_.shape, scale, dtype=getattr(torch, type_.dtype))


def outputs_in_order(graph: Graph, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [outputs[output.symbol] for output in graph.outputs if output.symbol in outputs]
