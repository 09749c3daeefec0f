"""What reports say about a prediction, each part computed once, when it is first needed;
and the sentence of what binds the step."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sambasim.costs.price import Bound
from sambasim.costs.work import Work, at_batch_size, device_bytes_of, work_of
from sambasim.ir.graph import MADE_AGAIN, Graph, SourceLine
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.types import SymbolKind
from sambasim.report.advice import compared_text, step_text
from sambasim.report.folds import Fold, Run, folds_of, runs_of_step
from sambasim.simulation.advice import Advice, Change, advise, fetched_outputs
from sambasim.simulation.alone import MODEL_KINDS, TimedSection, slowed
from sambasim.simulation.prediction import Prediction
from sambasim.units import counted, format_bytes, format_count, format_rate, format_seconds


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


WHICH_FLOPS = "FLOP of products a step, without recomputation"


def headline(prediction: Prediction, advice: Advice) -> str:
    """What takes the largest part of the step, and the change that gains most."""
    seconds, words = max(_parts(prediction), key=lambda part: part[0])
    step = "step" if prediction.program.training is not None else "forward"
    binds = f"{seconds / prediction.alone.predicted_s:.0%} of the {step} is {words}"
    best = next((one for one in advice.changes if not one.several), None)  # the sentence is about one replica
    return f"{binds}; {'no change to one replica gains more than 2%' if best is None else _best(best)}"


def _best(change: Change) -> str:
    """`return only the loss: 1.77 s -> 265.3 ms`; samples/s where a step has other samples, or other hardware."""
    where = f" ({change.where})" if change.where else ""
    before, after = change.before, change.after
    if before.samples == after.samples:
        return f"{change.what}{where}: {step_text(change)}"
    return f"{change.what}{where}: {compared_text(change)}"


def _parts(prediction: Prediction) -> list[tuple[float, str]]:
    """Seconds of the step, and what takes them."""
    step, by_bound = prediction.alone, prediction.alone.device_s_by_bound
    waits = {
        Bound.COMPUTE: "sections bound by compute",
        Bound.MEMORY: f"sections bound by {step.budget.memory}",
        Bound.CAPACITY: "sections whose weights exceed the chip, so that tensors are read again",
        Bound.LAUNCH: f"sections bound by their launch, at least {format_seconds(step.budget.launch_s)} each",
    }
    return [
        (step.host_s, f"the host: {_host(prediction)}"),
        *((by_bound[bound], words) for bound, words in waits.items()),
    ]


def _host(prediction: Prediction) -> str:
    step, program = prediction.alone, prediction.program
    each = "step" if step.micro_steps == 1 else "micro-step"
    starts_s = step.starts_s(MODEL_KINDS)
    if starts_s > step.sent_s:
        return f"it starts {counted(round(starts_s / step.start_s), 'section')} each {each}"
    fetched = fetched_outputs(program)
    fetched_bytes = step.batch_size * sum(one.bytes_per_sample for one in fetched)
    inputs = [program.symbols[name] for name in prediction.graph.inputs]
    inputs_bytes = sum(device_bytes_of(one.type) for one in inputs if one.kind is SymbolKind.INPUT)
    inputs_bytes = inputs_bytes * step.batch_size // program.batch_size
    if fetched_bytes > inputs_bytes:
        return f"it fetches {format_bytes(fetched_bytes)} of {' and '.join(one.name for one in fetched)} each {each}"
    return f"it sends {format_bytes(inputs_bytes)} of inputs each {each}"


def range_text(least_s: float, most_s: float) -> str:
    """`2.97 to 3.88 s`."""
    least, most = format_seconds(least_s), format_seconds(most_s)
    number, _, unit = least.partition(" ")
    return f"{number if unit == most.partition(' ')[2] else least} to {most}"


def model_flops(prediction: Prediction) -> int:
    """FLOPs of matrix products, convolutions, attention and recurrent layers in a step, without recomputation."""
    step, graph = prediction.alone, prediction.graph
    types = {**graph.values, **{name: symbol.type for name, symbol in prediction.program.symbols.items()}}
    made_again = 0
    for node in graph.nodes:
        flops = OPERATORS[node.operator].flops
        if flops is not None and node.name.endswith(MADE_AGAIN):
            made_again += flops(node, types.__getitem__)
    all_flops = sum(step.runs(section) * section.load.product_flops for section in step.sections)
    return all_flops - step.micro_steps * made_again * step.batch_size // prediction.program.batch_size


@dataclass(frozen=True, slots=True)
class Roof:
    """The most FLOP/s and bytes/s of the tiles in use."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte, below which memory is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def at(self, flops_per_byte: float) -> float:
        return min(self.flops_per_s, flops_per_byte * self.bytes_per_s)


def reachable(prediction: Prediction) -> Roof:
    """What sections reach by the calibration: the units that operators are placed on, at the rate of the fastest kind
    of product."""
    step, budget = prediction.alone, prediction.alone.budget
    products = (product for section in step.sections for product in section.load.products)
    rate = max((product.flops / product.unit_s for product in products), default=budget.unit_flops_per_s)
    return Roof(budget.placeable_units * rate, slowed(budget, step.tiers.rest).memory_bytes_per_s)


def published(prediction: Prediction) -> Roof:
    device = prediction.device
    share = 1.0 if prediction.tiles is None or device.tiles is None else prediction.tiles / device.tiles
    memory = device.hbm_bandwidth_bytes_per_s or device.ddr_bandwidth_bytes_per_s
    return Roof(device.peak_bf16_flops_per_s * share, memory * share)


def roof_text(roof: Roof) -> str:
    return f"{format_count(roof.flops_per_s)}FLOP/s, {format_bytes(roof.bytes_per_s)}/s"


def roofs_text(prediction: Prediction) -> str:
    roof, memory = reachable(prediction), prediction.alone.budget.memory
    reached = f"{roof_text(roof)} reachable, of {roof_text(published(prediction))} published"
    return f"{reached}; {memory} is the limit of a section below {format_rate(roof.ridge)} FLOPs per byte"


def mfu(prediction: Prediction) -> float:
    """Model FLOPs of a step over its whole time, host included, as a share of the peak of the tiles in use."""
    return model_flops(prediction) / prediction.alone.predicted_s / published(prediction).flops_per_s


def mfu_text(prediction: Prediction) -> str:
    """Of what the MFU is a share, without its unit."""
    numbers = (model_flops(prediction), published(prediction).flops_per_s)
    flops, peak = map(format_count, numbers)
    return f"{flops}{WHICH_FLOPS}; its tiles have {peak}FLOP/s"


_MOST_LINES = 3


class Analysis:
    """Of one replica; a replica of several ranks has none."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.step = prediction.alone

    @cached_property
    def advice(self) -> Advice:
        return advise(self.prediction)

    @cached_property
    def headline(self) -> str:
        return headline(self.prediction, self.advice)

    @cached_property
    def work(self) -> Work:
        """Of the batch that is predicted."""
        program, graph = self.prediction.program, self.prediction.graph
        return at_batch_size(work_of(graph, program.symbols), program.batch_size, self.step.batch_size)

    @cached_property
    def stages(self) -> Stages:
        return stages_of(self.work, self.step.sections)

    @cached_property
    def lines(self) -> Sequence[str]:
        """FILE:LINE of the costliest operator of each section; empty where none has a line, as in an update."""
        graph, pairs = self.prediction.graph, zip(self.stages.rows, self.step.sections, strict=True)
        found = (costliest_line(graph, rows, section) for rows, section in pairs)
        return ["" if line is None else f"{line.file}:{line.line}" for line in found]

    @cached_property
    def line_s(self) -> Mapping[str, float]:
        """Seconds of the device in a step by line, the most first."""
        graph, found = self.prediction.graph, defaultdict[str, float](float)
        for rows, section in zip(self.stages.rows, self.step.sections, strict=True):
            for row, seconds in zip(rows, seconds_of(rows, graph, section), strict=True):
                if line := graph.nodes[row.node].source:
                    found[f"{line.file}:{line.line}"] += self.step.runs(section) * seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    @property
    def costliest_lines(self) -> str:
        """`models.py:26 36%, models.py:36 31%`, of the device time; empty without source lines."""
        shown = list(self.line_s.items())[:_MOST_LINES]
        return ", ".join(f"{line} {seconds / self.step.device_s:.0%}" for line, seconds in shown)

    @cached_property
    def runs(self) -> Sequence[Run]:
        return runs_of_step(self.step, self.prediction.graph)

    @cached_property
    def folds(self) -> Sequence[Fold]:
        return folds_of(self.step, self.prediction.graph)

    @cached_property
    def fold_of(self) -> Sequence[int]:
        """The number of the fold of each section."""
        of_section = {section: number for number, fold in enumerate(self.folds) for section in fold.numbers}
        return [of_section[section] for section in range(len(self.step.sections))]

    def runs_in_step(self, fold: Fold) -> int:
        """How often sections of `fold` run in a step, micro-steps included."""
        return sum(self.step.runs(self.step.sections[number]) for number in fold.numbers)

    def fold_s(self, fold: Fold) -> float:
        """Seconds of all these runs."""
        return self.runs_in_step(fold) * self.step.sections[fold.numbers[0]].price.predicted_s
