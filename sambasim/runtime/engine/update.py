"""Executes the update of a graph on one rank: reduce, optimizer steps, gather, and the end of the step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from time import perf_counter_ns
from types import MappingProxyType
from typing import NamedTuple

from sambasim.ir.dataflow import groups_of
from sambasim.ir.graph import Node, Section
from sambasim.records.trace import Track
from sambasim.runtime.engine.code import Code, generate, raise_for
from sambasim.runtime.engine.executor import Executor, Steps
from sambasim.runtime.engine.handlers import UPDATES, Binding, executed_by, instruction_of, nothing
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Unit
from sambasim.runtime.transports.communication import BYTE_COUNTS, Fusion, Overlapped
from sambasim.runtime.transports.connect import Transport
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import StepObserver, report_spans, span

_MERGED = ("comm.reduce_scatter", "comm.all_gather")
"""Operators on parameter groups: one communication may execute several adjacent nodes."""


def lower_update(sections: Sequence[Section], nodes: Sequence[Node], binding: Binding) -> list[Unit]:
    """The update, which consists of `sections`. `nodes`: all those of the graph."""
    units: list[Unit] = []
    begun: list[Instruction] = []
    left, reached = sections, sections[0].start if sections else 0
    for instruction, count in _update_instructions([*nodes[reached:]] if sections else [], binding):
        reached += count
        if instruction.function is not nothing:
            begun.append(instruction)
        ended = [section for section in left if section.stop <= reached]
        if ended:
            units.append(Unit(tuple(ended), tuple(begun)))
            begun, left = [], left[len(ended) :]
    return units


def _update_instructions(nodes: Sequence[Node], binding: Binding) -> Iterator[tuple[Instruction, int]]:
    """Each instruction, and how many of `nodes` it executes."""
    runs = [_Run(operator, tuple(run)) for operator, run in groupby(nodes, key=_operator)]
    fusions = sorted(binding.connected.fusions(), key=lambda fusion: -len(fusion.pattern))
    groups = [group.name for group in binding.connected.program.groups]
    while runs:
        fusion = next((fusion for fusion in fusions if _fits(fusion, runs, groups)), None)
        taken = runs[: len(fusion.pattern) if fusion else 1]
        runs = runs[len(taken) :]
        if fusion is not None:
            yield _fused(fusion, taken, binding), sum(len(run.nodes) for run in taken)
        elif taken[0].operator in _MERGED:
            node = _merged(taken[0].nodes)
            yield instruction_of(node, binding), len(taken[0].nodes)
        else:
            for node in taken[0].nodes:
                yield instruction_of(node, binding), 1


def _merged(nodes: Sequence[Node]) -> Node:
    """One node that works on the groups of all."""
    groups = tuple(name for node in nodes for name in groups_of(node))
    return replace(nodes[0], name=" ".join(node.name for node in nodes), args=(groups,))


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent update nodes of one operator; `opt` stands for any optimizer."""

    operator: str
    nodes: tuple[Node, ...]


def _operator(node: Node) -> str:
    return "opt" if node.operator in UPDATES else node.operator


def _fits(fusion: Fusion, runs: Sequence[_Run], groups: Sequence[str]) -> bool:
    """Whether `runs` begin with the pattern of `fusion`, and each run that works on groups works on all of them."""
    first = runs[: len(fusion.pattern)]
    named = [[name for node in run.nodes for name in groups_of(node)] for run in first]
    return tuple(run.operator for run in first) == fusion.pattern and all(
        names in ([], list(groups)) for names in named
    )


def _fused(fusion: Fusion, runs: Sequence[_Run], binding: Binding) -> Instruction:
    """One instruction for `runs`. It returns the norm if one of the nodes computes it."""
    first, normed = runs[0].nodes[0], [run.nodes[0] for run in runs if run.operator == "opt.total_norm"]
    node = Node(first.name, first.operator, results=normed[0].results if normed else ())
    return executed_by(fusion.bind(binding.updating), node, binding)


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
