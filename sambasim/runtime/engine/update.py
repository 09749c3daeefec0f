"""Executes the update of a graph on one rank: reduce, optimizer steps, gather, and the end of the step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from types import MappingProxyType
from typing import NamedTuple

from sambasim.ir.graph import Node
from sambasim.records.trace import Track
from sambasim.runtime.engine.code import Code, generate
from sambasim.runtime.engine.executor import Executor, Steps
from sambasim.runtime.engine.handlers import Binding
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Unit
from sambasim.runtime.engine.lowering import lower_update
from sambasim.runtime.engine.operator_errors import raise_for
from sambasim.runtime.transports.communication import BYTE_COUNTS, Overlapped
from sambasim.runtime.transports.transport import Transport
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import StepObserver, report_spans, span

_NONE: Mapping[str, float] = MappingProxyType({})


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


class Update:
    """The update after passes of `executor`. `overlaps`: communication may overlap with the last of them."""

    def __init__(
        self, executor: Executor, transport: Transport, optimizers: Optimizers, *, overlaps: bool = True
    ) -> None:
        self._transport, self.optimizers = transport, optimizers
        self._waited_in_passes_s = executor.waited_s
        self._detailed: StepObserver | None = None  # the observer, if it wants details
        self._waited_s: dict[str, float] = defaultdict(float)
        self._began_ns = 0  # the sections that are reported next
        registers, graph = RegisterFile(), executor.graph
        binding = Binding(registers, graph.values, {}, executor.tensor_of, transport, optimizers)
        self._units = lower_update(executor.update_sections, graph.nodes, binding)
        norms = [node.results[0] for node in graph.nodes if node.operator == "opt.total_norm"]
        self._norm = registers.value(norms[0]) if norms and norms[0] else None
        self._shared, end = registers.constant(None), transport.end
        node = Node("end_of_step", "comm.end_of_step")
        exchange = Instruction(node, end.finish, (), single=True, results=(self._shared,), stores=(), communication=end)
        self._end = Unit((), (exchange,))
        self._initial = registers.initial
        self._codes: dict[tuple[bool, bool], Code] = {}
        communications = (instruction.communication for unit in self._units for instruction in unit.instructions)
        self._overlapped = [overlapped for overlapped in communications if isinstance(overlapped, Overlapped)]
        self.overlapping = self._overlapped if overlaps else []
        """What is told of each section of the last pass."""

    def observe(self, observer: StepObserver | None) -> None:
        self._detailed = observer if observer is not None and observer.detailed else None
        report_spans(self, observer, self._transport.rank)
        self._transport.observe(observer)

    @span(Track.HOST, "begin step")
    def begin_step(self, number: int, rate: float, loss_scale: float = 1.0) -> None:
        """Begin optimizer step `number` (from 1), before its last pass. Returns when gradients may be overwritten."""
        self.optimizers.begin(number, rate, loss_scale)
        self._transport.sync.wait_for_readers()
        for overlapped in self._overlapped:
            overlapped.begin_step()

    def run(
        self, losses: Sequence[float], request: int = 0, began_ns: int = 0, *, applies: bool = True
    ) -> Steps[Updated]:
        """Run the update sections; afterwards every replica has the parameters of the next step. `losses`: of this
        rank's replica; `request`: what this rank asks of the run; `began_ns`: when the passes ended, to be returned.
        Unless it `applies`, only losses and requests are exchanged."""
        transport, detailed, moved = self._transport, self._detailed if applies else None, (0, 0, 0, 0)
        update_began_ns = 0
        if detailed is not None:
            update_began_ns, moved = perf_counter_ns(), transport.sync.bytes_moved.counts()
            detailed.span_begins(transport.rank, Track.HOST, "sync and update")
        transport.sync.offer(losses, request)
        hidden_s = 0.0
        for overlapped in self._overlapped:
            hidden_s += overlapped.hidden_s
        live, key = self._initial.copy(), (applies, detailed is not None)
        code = self._codes.get(key) or self._generate(key)
        self._began_ns = update_began_ns
        try:
            if code.yields:
                yield from code.run(live, self._ended)
            else:
                code.run(live, self._ended)
        except Exception as error:
            raise_for(error, code.failed(error), list)
            raise
        norm = None if self._norm is None else live[self._norm]
        applied = norm is None or not self.optimizers.skips(norm)
        if detailed is not None:
            counts = zip(BYTE_COUNTS, transport.sync.bytes_moved.counts(), moved, strict=True)
            args = {name: now - before for name, now, before in counts if now != before}
            detailed.span_ends(transport.rank, Track.HOST, "sync and update", update_began_ns, args)
        exposed_s, waited_s = sum(self._waited_s.values()), _NONE
        self._waited_s.clear()
        if self._waited_in_passes_s:
            waited_s = self._waited_in_passes_s.copy()
            self._waited_in_passes_s.clear()
        losses, request = live[self._shared]
        return Updated(losses, request, norm, exposed_s, hidden_s, began_ns, waited_s, applied)

    def _generate(self, key: tuple[bool, bool]) -> Code:
        """The code of the update if it applies, or of the end of the step alone; with reports after each section."""
        applies, reports = key
        units = [*self._units, self._end] if applies else [self._end]
        code = self._codes[key] = generate(units, self._waited_s, reports=reports)
        return code

    def _ended(self, unit: Unit) -> None:
        if self._detailed is not None:
            self._detailed.sections_end(self._transport.rank, unit.sections, self._began_ns)
        self._began_ns = perf_counter_ns()
