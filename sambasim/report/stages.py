"""The operators of each section of a predicted step: what each moves, the costliest of them, and the tensors between
sections."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sambasim.costs.price import Bound
from sambasim.costs.work import Work
from sambasim.ir.graph import Graph, SourceLine
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.simulation.step import TimedSection


class StageRow(NamedTuple):
    """A stage of a section: its node, bytes streamed from memory, resident bytes read, bytes written to memory, FLOPs,
    its reads of earlier stages (pairs of stage and bytes of one row), and the bytes of one row of all that it passes
    on."""

    node: int
    streamed_bytes: int
    resident_bytes: int
    written_bytes: int
    flops: int
    reads: list[tuple[int, int]]
    row_bytes: int

    @property
    def traffic_bytes(self) -> int:
        return self.streamed_bytes + self.resident_bytes + self.written_bytes


class Stages(NamedTuple):
    """`rows` are by section; `tensors` are the bytes that a section reads of what an earlier one wrote, by both
    numbers."""

    rows: list[list[StageRow]]
    tensors: Counter[tuple[int, int]]


def stages_of(work: Work, sections: Sequence[TimedSection]) -> Stages:
    nodes = [stage.node for stage in work.stages]
    tensors: Counter[tuple[int, int]] = Counter()
    made_by: dict[str, int] = {}
    rows = [
        _rows(work, range(*(bisect_left(nodes, node) for node in section.nodes)), number, made_by, tensors)
        for number, section in enumerate(sections)
    ]
    return Stages(rows, tensors)


def _rows(
    work: Work, numbers: range, section: int, made_by: dict[str, int], tensors: Counter[tuple[int, int]]
) -> list[StageRow]:
    read_here = {read.value for number in numbers for read in work.stages[number].reads}
    made: dict[str, int] = {}
    seen: set[str] = set()
    parts: dict[str, float] = {}
    found = []
    for place, number in enumerate(numbers):
        stage = work.stages[number]
        streamed = resident = written = handed = 0
        buffers: list[tuple[int, int]] = []
        for read in stage.reads:
            tensor = work.tensors[read.value]
            if read.value in made:
                buffers.append((made[read.value], tensor.row_bytes))
            elif read.view not in seen:
                seen.add(read.view)
                before = parts.get(read.value, 0.0)
                parts[read.value] = min(1.0, before + read.part)
                read_bytes = int(tensor.size_bytes * (parts[read.value] - before))
                resident += read_bytes if tensor.resident else 0
                streamed += 0 if tensor.resident else read_bytes
                if read.value in made_by:
                    tensors[made_by[read.value], section] += read_bytes
        for value in stage.writes:
            made[value] = place
            made_by[value] = section
            handed += work.tensors[value].row_bytes if value in read_here else 0
            if value in work.kept or work.last_reader.get(value, -1) > numbers[-1]:
                written += work.tensors[value].size_bytes
        found.append(StageRow(stage.node, streamed, resident, written, stage.product_flops, buffers, handed))
    return found


def seconds_of(rows: Sequence[StageRow], graph: Graph, section: TimedSection) -> list[float]:
    """The seconds of `section`, divided over its operators by what binds it: their products, or their traffic."""
    budget, binds = section.budget, section.price.bound

    def weight(row: StageRow) -> float:
        if binds is not Bound.COMPUTE:
            return row.traffic_bytes
        convolves = OPERATORS[graph.nodes[row.node].operator].kind is OperatorKind.CONVOLUTION
        return row.flops / (budget.convolution_flops_per_s if convolves else budget.unit_flops_per_s)

    weights = [weight(row) for row in rows]
    total = sum(weights)
    return [section.price.predicted_s * (one / total if total else 1 / len(rows)) for one in weights]


def costliest_line(graph: Graph, rows: Sequence[StageRow], section: TimedSection) -> SourceLine | None:
    """The line of the operator that takes most of `section`, of those that have a line."""
    with_line = [
        (seconds, row.node)
        for seconds, row in zip(seconds_of(rows, graph, section), rows, strict=True)
        if graph.nodes[row.node].source is not None
    ]
    return graph.nodes[max(with_line)[1]].source if with_line else None
