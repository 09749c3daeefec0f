"""The update of a graph on one rank: reduce, optimizer steps, gather, and the end of the step.

Adjacent reduce_scatter and all_gather nodes are one communication. Where a transport has a fusion for the runs that
follow, one instruction executes them: over a shared window, the whole update is one pass over memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from time import perf_counter_ns
from typing import NamedTuple

from sambasim.ir.dataflow import groups_of
from sambasim.ir.graph import Node, Section
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.records.trace import Track
from sambasim.runtime.engine.code import Code, generate
from sambasim.runtime.engine.executor import Executor, Steps
from sambasim.runtime.engine.handlers import UPDATES, Binding, executed_by, instruction_of
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Unit
from sambasim.runtime.transports.communication import nothing
from sambasim.runtime.transports.connect import Transport
from sambasim.runtime.transports.window import WindowReduce
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import StepObserver, report_spans, span


def _lower_update(sections: Sequence[Section], nodes: Sequence[Node], binding: Binding) -> list[Unit]:
    units: list[Unit] = []
    begun: list[Instruction] = []
    left, reached = sections, sections[0].start if sections else len(nodes)
    for instruction, count in _update_instructions(nodes[reached:], binding):
        reached += count
        if instruction.function is not nothing:
            begun.append(instruction)
        ended = [section for section in left if section.stop <= reached]
        if ended:
            units.append(Unit(tuple(ended), tuple(begun), reached))
            begun, left = [], left[len(ended) :]
    return units


def _update_instructions(nodes: Sequence[Node], binding: Binding) -> Iterator[tuple[Instruction, int]]:
    """Each instruction, and how many of `nodes` it executes."""
    by_operator = groupby(nodes, key=lambda node: "opt" if node.operator in UPDATES else node.operator)
    runs = [(operator, tuple(run)) for operator, run in by_operator]
    fusions = sorted(binding.connected.fusions().items(), key=lambda fusion: -len(fusion[0]))
    groups = [group.name for group in binding.connected.program.groups]
    while runs:
        pattern, bind = next((fusion for fusion in fusions if _fits(fusion[0], runs, groups)), ((), None))
        taken = runs[: len(pattern) or 1]
        runs = runs[len(taken) :]
        executed = [node for _, run in taken for node in run]
        first = executed[0]
        if bind is not None:  # it returns the norm if one of the nodes computes it
            normed = next((node.results for node in executed if node.operator == "opt.total_norm"), ())
            node = Node(first.name, first.operator, results=normed)
            yield executed_by(bind(binding.updating), node, binding), len(executed)
        elif first.operator in ("comm.reduce_scatter", "comm.all_gather"):
            groups_of_all = tuple(name for node in executed for name in groups_of(node))
            node = replace(first, name=" ".join(node.name for node in executed), args=(groups_of_all,))
            yield instruction_of(node, binding), len(executed)
        else:
            yield from ((instruction_of(node, binding), 1) for node in executed)


def _fits(pattern: tuple[str, ...], runs: Sequence[tuple[str, Sequence[Node]]], groups: Sequence[str]) -> bool:
    """Whether `runs` of adjacent update nodes, each behind its operator (`opt`: any optimizer), begin with `pattern`,
    and each run that works on groups works on all of them."""
    first = runs[: len(pattern)]
    named = [[name for node in nodes for name in groups_of(node)] for _, nodes in first]
    return tuple(operator for operator, _ in first) == pattern and all(names in ([], groups) for names in named)


class Updated(NamedTuple):
    """The results of an update: the losses of all replicas, the means over them of what is logged, by name, the largest
    request, the norm of the gradients before clipping (or None), the seconds of communication after the pass ended and
    during it, when it began, the seconds that the passes of the step waited for communication, by mesh axis, and
    whether it was applied, not skipped."""

    losses: Sequence[float]
    logged: dict[str, float]
    request: int
    norm: float | None
    exposed_s: float
    hidden_s: float
    began_ns: int
    waited_s: Mapping[str, float]
    applied: bool

    def after(self, earlier: Sequence["Updated"]) -> "Updated":
        """With the seconds of exchanges in the same step, of which the first one began behind the passes."""
        if not earlier:
            return self
        exposed_s = self.exposed_s + sum(one.exposed_s for one in earlier)
        return self._replace(began_ns=earlier[0].began_ns, exposed_s=exposed_s, waited_s=earlier[0].waited_s)


class Update:
    """The update after passes of `executor`. `overlaps`: communication may overlap with the last of them."""

    def __init__(self, executor: Executor, transport: Transport, optimizers: Optimizers, overlaps: bool = True) -> None:
        self._transport, self.optimizers = transport, optimizers
        self._waited_in_passes_s = executor.waited_s
        self._detailed: StepObserver | None = None  # the observer, if it wants details
        self._waited_s: dict[str, float] = defaultdict(float)
        self._began_ns = 0  # the sections that are reported next
        registers, graph = RegisterFile(), executor.graph
        binding = Binding(registers, graph.values, executor.tensor_of, transport, optimizers)
        self._units = _lower_update(executor.update_sections, graph.nodes, binding)
        norms = [node.results[0] for node in graph.nodes if node.operator == "opt.total_norm"]
        self._norm = registers.value(norms[0]) if norms and norms[0] else None
        self._shared, end = registers.constant(None), transport.end
        self._logged, self._exchanged = tuple(transport.program.logged), transport.program.exchanged
        # A rank alone communicates with nobody, also with no parameter server: there is nothing to time.
        is_alone = transport.mesh.world_size == transport.sync.group.size == 1
        node, communication = Node("end_of_step", "comm.end_of_step"), None if is_alone else end
        exchange = Instruction(node, end.finish, (), 1, (self._shared,), stores=(), communication=communication)
        self._end = Unit((), (exchange,), len(graph.nodes))
        self._initial = registers.initial
        self._codes: dict[bool, Code] = {}  # by whether it applies, for the observer
        communications = (instruction.communication for unit in self._units for instruction in unit.instructions)
        self._overlapped = [overlapped for overlapped in communications if isinstance(overlapped, WindowReduce)]
        self.overlapping = self._overlapped if overlaps else []
        """What is told of each section of the last pass."""

    def observe(self, observer: StepObserver | None) -> None:
        self._detailed = observer if observer is not None and observer.detailed else None
        self._codes.clear()
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
        self, losses: Sequence[float], request: int = 0, *, applies: bool = True, settles: bool = True
    ) -> Steps[Updated]:
        """Run the update sections; afterwards every replica has the parameters of the next step, unless it `settles`
        later. `losses`: of this rank's replica, and what is logged beside it. Unless it `applies`, only they and
        requests are exchanged."""
        transport, detailed = self._transport, self._detailed if applies else None
        moved: dict[str, int] = {}
        self._began_ns = began_ns = perf_counter_ns()
        if detailed is not None:
            moved = asdict(transport.sync.bytes_moved)
            detailed.span_begins(transport.rank, Track.HOST, "sync and update")
        transport.sync.offer(losses, request)
        hidden_s = 0.0
        for overlapped in self._overlapped:
            hidden_s += overlapped.hidden_s
            if overlapped.waited_in_pass_s:
                self._waited_in_passes_s[DATA_PARALLEL] += overlapped.waited_in_pass_s
        if (code := self._codes.get(applies)) is None:
            units = [*self._units, self._end] if applies else [self._end]
            code = self._codes[applies] = generate(units, self._waited_s, reports=detailed is not None)
        live = self._initial.copy()
        yield from code.run(live, self._ended)
        norm = None if self._norm is None else live[self._norm]
        if settles or detailed is not None:
            transport.sync.settle()
        if detailed is not None:
            now = asdict(transport.sync.bytes_moved)
            args = {f"{name}_bytes": now[name] - before for name, before in moved.items() if now[name] != before}
            detailed.span_ends(transport.rank, Track.HOST, "sync and update", began_ns, args)
        shared, request = live[self._shared]
        losses, logged = shared, {}
        if self._logged and shared:
            losses, *of_names = (shared[at :: self._exchanged] for at in range(self._exchanged))
            named = zip(self._logged, of_names, strict=True)
            logged = {name: sum(values) / len(values) for name, values in named if values}
        applied = norm is None or not self.optimizers.skips(norm)
        exposed_s = 0.0
        waited_s: dict[str, float] = {}
        if self._waited_s:
            exposed_s = sum(self._waited_s.values())
            self._waited_s.clear()
        if self._waited_in_passes_s:
            waited_s |= self._waited_in_passes_s
            self._waited_in_passes_s.clear()
        return Updated(losses, logged, request, norm, exposed_s, hidden_s, began_ns, waited_s, applied)

    def _ended(self, unit: Unit) -> None:
        if self._detailed is not None and unit.sections:
            self._detailed.sections_end(self._transport.rank, unit.sections, self._began_ns)
        self._began_ns = perf_counter_ns()
