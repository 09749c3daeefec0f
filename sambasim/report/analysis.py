"""What reports say about the prediction of one replica: what takes the largest part and what would make it quicker, in
the same words everywhere; equal sections, stages and costliest lines of sections, MFU and roofs."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.price import Bound
from sambasim.costs.work import Work, device_bytes_of
from sambasim.ir.graph import MADE_AGAIN, Graph, SourceLine
from sambasim.ir.operators import OPERATORS, OperatorKind, flops_of
from sambasim.ir.types import SymbolKind
from sambasim.report.tables import Table, labelled, text_table
from sambasim.simulation.advice import Advice, Change, Step, advise, fetched_outputs
from sambasim.simulation.alone import RankAlone, TimedSection, slowed
from sambasim.simulation.prediction import PRICED_IN, Prediction
from sambasim.units import counted, format_bytes, format_count, format_rate, format_seconds

BACKED = "published steps back only those of SN30; the host is taken to be as fast beside every device"
NOT_VALIDATED = (
    "pipeline and tensor parallelism are not validated: messages take the published bandwidths and latencies of links; "
    "no step of several RDUs was ever published"
)
NO_CHANGE = "no other outputs, batch, tiles, accumulation, level, sync or clipping gains more than 2%"


def step_or_forward(prediction: Prediction) -> str:
    return "step" if prediction.program.training is not None else "forward"


def _host(prediction: Prediction) -> str:
    step, program = prediction.alone, prediction.program
    each = "step" if step.micro_steps == 1 else "micro-step"
    if step.starts_s > step.sent_s:
        return f"it starts {counted(len(step.model), 'section')} each {each}"
    fetched = fetched_outputs(program)
    fetched_bytes = step.batch_size * sum(output.bytes_per_sample for output in fetched)
    symbols = (program.symbols[name] for name in prediction.graph.inputs)
    of_compiled = sum(device_bytes_of(symbol.type) for symbol in symbols if symbol.kind is SymbolKind.INPUT)
    inputs_bytes = of_compiled * step.batch_size // program.batch_size
    if fetched_bytes <= inputs_bytes:
        return f"it sends {format_bytes(inputs_bytes)} of inputs each {each}"
    names = " and ".join(output.name for output in fetched)
    return f"it fetches {format_bytes(fetched_bytes)} of {names} each {each}"


def change_texts(change: Change) -> tuple[str, str, str, str]:
    """The gain (`x1.72`), the step before and after, the samples/s before and after and whose, and how to do it."""
    steps = " -> ".join(format_seconds(step.predicted_s) for step in (change.before, change.after))
    rates = " -> ".join(format_rate(step.samples_per_s) for step in (change.before, change.after))
    how = f"{change.how} ({change.where})" if change.where else change.how
    return f"x{change.factor:.2f}", steps, f"{rates} samples/s by {change.compared}", how


def devices_table(advice: Advice) -> Table:
    def figures(step: Step | None) -> tuple[str, str]:
        return (format_seconds(step.predicted_s), format_rate(step.samples_per_s)) if step else ("does not fit", "")

    rows = [(device, *figures(step)) for device, step in advice.devices]
    return text_table("One replica on a whole RDU", ("device",), ("step", "samples/s"), rows)


def advice_parts(advice: Advice) -> list[RenderableType]:
    heading = "what would make it quicker, each predicted again by itself" if advice.changes else NO_CHANGE
    rows = []
    for change in advice.changes:
        gain, steps, rates, how = change_texts(change)
        rows += [(gain, f"{change.what}: a step of {steps}; {rates}"), ("", how)]
    return [Text(f"\n{heading}", style="bold"), labelled(rows), Text(), devices_table(advice), Text(f"{BACKED}\n")]


def advice_fields(advice: Advice) -> Mapping[str, object]:
    def fields_of(step: Step | None, when: str = "") -> Mapping[str, float | None]:
        step_s, rate = (None, None) if step is None else (step.predicted_s, step.samples_per_s)
        return {f"predicted_s{when}": step_s, f"predicted_samples_per_s{when}": rate}

    changes = [
        {
            "change": change.what,
            **{name: getattr(change, name) for name in ("how", "where", "compared")},
            **fields_of(change.before, "_before"),
            **fields_of(change.after),
            "predicted_gain_samples_per_s": change.after.samples_per_s - change.before.samples_per_s,
        }
        for change in advice.changes
    ]
    devices = [{"device": device, **fields_of(step)} for device, step in advice.devices]
    return {"priced_in": PRICED_IN, "advice": changes, "devices": devices}


def fitting_text(fits: Mapping[str, RankAlone]) -> str:
    """What to type so that a program fits, and what is predicted then: a line for each."""
    return "\n".join(
        f"{how}: a step of {format_seconds(step.predicted_s)}, {format_rate(step.samples_per_s)} samples/s (predicted),"
        f" {format_bytes(step.need.size_bytes)} of {format_bytes(step.budget.capacity_bytes)}"
        for how, step in fits.items()
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Sections `start` up to `stop`: `count` times `period` of them; a section that does not repeat is a run of one."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


def runs_of(keys: Sequence[Hashable]) -> list[Run]:
    """From the start, always the run that covers most, with the shortest period."""
    number_of: dict[Hashable, int] = {}
    numbers = [number_of.setdefault(key, len(number_of)) for key in keys]
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers):
        places[number].append(place)
    runs: list[Run] = []
    start = 0
    while start < len(numbers):
        best = Run(start, 1, 1)
        for again in places[numbers[start]]:
            period, count = again - start, 1
            if period <= 0 or again + period > len(numbers):
                continue
            while numbers[start + count * period : start + (count + 1) * period] == numbers[start:again]:
                count += 1
            if count > 1 and period * count > best.period * best.count:
                best = Run(start, period, count)
        runs.append(best)
        start = best.stop
    return runs


class StageRow(NamedTuple):
    """A stage of a section, in the order that page.js takes; `reads`: of earlier stages, with the bytes of a row;
    `row_bytes`: of a row of all that it passes on."""

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


class Stages:
    """`rows` by section; `tensors`: the bytes that a section reads of what an earlier one wrote, by both numbers."""

    def __init__(self, work: Work, sections: Sequence[TimedSection]) -> None:
        self.tensors: Counter[tuple[int, int]] = Counter()
        self._work = work
        self._made_by: dict[str, int] = {}
        nodes = [stage.node for stage in work.stages]
        spans = [range(*(bisect_left(nodes, node) for node in section.nodes)) for section in sections]
        self.rows = [self._rows_of(section, span) for section, span in enumerate(spans)]

    def _rows_of(self, section: int, numbers: range) -> list[StageRow]:
        work = self._work
        read_here = {read.value for number in numbers for read in work.stages[number].reads}
        made: dict[str, int] = {}
        seen: set[str] = set()
        parts: defaultdict[str, float] = defaultdict(float)
        rows = []
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
                    before = parts[read.value]
                    parts[read.value] = min(1.0, before + read.part)
                    read_bytes = int(tensor.size_bytes * (parts[read.value] - before))
                    resident += read_bytes if tensor.resident else 0
                    streamed += 0 if tensor.resident else read_bytes
                    if read.value in self._made_by:
                        self.tensors[self._made_by[read.value], section] += read_bytes
            for value in stage.writes:
                made[value], self._made_by[value] = place, section
                handed += work.tensors[value].row_bytes if value in read_here else 0
                if value in work.kept or work.last_reader.get(value, -1) > numbers[-1]:
                    written += work.tensors[value].size_bytes
            rows.append(StageRow(stage.node, streamed, resident, written, stage.product_flops, buffers, handed))
        return rows


def seconds_of(rows: Sequence[StageRow], graph: Graph, section: TimedSection) -> list[float]:
    """The seconds of `section`, divided over its operators by what binds it: their products, or their traffic."""
    budget, binds = section.budget, section.price.bound

    def weight(row: StageRow) -> float:
        if binds is not Bound.COMPUTE:
            return row.traffic_bytes
        convolves = OPERATORS[graph.nodes[row.node].operator].kind is OperatorKind.CONVOLUTION
        return row.flops / (budget.convolution_flops_per_s if convolves else budget.unit_flops_per_s)

    total = sum(map(weight, rows))
    return [section.price.predicted_s * (weight(row) / total if total else 1 / len(rows)) for row in rows]


def costliest_line(graph: Graph, rows: Sequence[StageRow], section: TimedSection) -> SourceLine | None:
    """The line of the operator that takes most of `section`, of those that have a line."""
    pairs = zip(seconds_of(rows, graph, section), (row.node for row in rows), strict=True)
    with_line = [(seconds, node) for seconds, node in pairs if graph.nodes[node].source is not None]
    return graph.nodes[max(with_line)[1]].source if with_line else None


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

    def __str__(self) -> str:
        return f"{format_count(self.flops_per_s)}FLOP/s, {format_bytes(self.bytes_per_s)}/s"


class Analysis:
    """Of one replica; a replica of several ranks has none. A fold is the numbers of equal sections, of any runs."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction, self.step = prediction, prediction.alone

    @cached_property
    def advice(self) -> Advice:
        return advise(self.prediction)

    @cached_property
    def headline(self) -> str:
        """`94% of the step is the host: …; return only the loss: 1.77 s -> 265.3 ms`: what takes the largest part, and
        the change to one replica that gains most, in samples/s if a step then has other samples or other hardware."""
        prediction, alone, by_bound = self.prediction, self.step, self.step.device_s_by_bound
        launch = f"sections bound by their launch, at least {format_seconds(alone.budget.launch_s)} each"
        words_of = {
            f"the host: {_host(prediction)}": alone.host_s,
            "sections bound by compute": by_bound[Bound.COMPUTE],
            f"sections bound by {alone.budget.memory}": by_bound[Bound.MEMORY],
            "sections whose weights exceed the chip, so that tensors are read again": by_bound[Bound.CAPACITY],
            launch: by_bound[Bound.LAUNCH],
        }
        words, seconds = max(words_of.items(), key=lambda part: part[1])
        binds = f"{seconds / alone.predicted_s:.0%} of the {step_or_forward(prediction)} is {words}"
        best = next((change for change in self.advice.changes if not change.several), None)
        if best is None:
            return f"{binds}; no change to one replica gains more than 2%"
        where, (_, steps, rates, _) = f" ({best.where})" if best.where else "", change_texts(best)
        return f"{binds}; {best.what}{where}: {steps if best.before.samples == best.after.samples else rates}"

    @cached_property
    def stages(self) -> Stages:
        return Stages(self.step.work, self.step.sections)

    @cached_property
    def lines(self) -> Sequence[str]:
        """FILE:LINE of the costliest operator of each section; empty where none has a line, as in an update."""
        pairs = zip(self.stages.rows, self.step.sections, strict=True)
        lines = (costliest_line(self.prediction.graph, rows, section) for rows, section in pairs)
        return ["" if line is None else f"{line.file}:{line.line}" for line in lines]

    @cached_property
    def line_s(self) -> Mapping[str, float]:
        """Seconds of the device in a step by line, the most first."""
        graph, by_line = self.prediction.graph, defaultdict[str, float](float)
        for rows, section in zip(self.stages.rows, self.step.sections, strict=True):
            for row, seconds in zip(rows, seconds_of(rows, graph, section), strict=True):
                if line := graph.nodes[row.node].source:
                    by_line[f"{line.file}:{line.line}"] += self.step.runs(section) * seconds
        return dict(sorted(by_line.items(), key=lambda pair: -pair[1]))

    @property
    def costliest_lines(self) -> str:
        """`models.py:26 36%, models.py:36 31%`, of the device time; empty without source lines."""
        three = list(self.line_s.items())[:3]
        return ", ".join(f"{line} {seconds / self.step.device_s:.0%}" for line, seconds in three)

    @cached_property
    def _keys(self) -> Sequence[Hashable]:
        """Of each section; those of equal sections are equal."""
        nodes, sections = [(node.operator, node.source) for node in self.prediction.graph.nodes], self.step.sections
        return [(each.kind, each.load, each.price, tuple(nodes[slice(*each.nodes)])) for each in sections]

    @cached_property
    def runs(self) -> Sequence[Run]:
        return runs_of(self._keys)

    @cached_property
    def folds(self) -> Sequence[tuple[int, ...]]:
        """Each section is in one; in the order of their first sections."""
        numbers: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number, key in enumerate(self._keys):
            numbers[key].append(number)
        return list(map(tuple, numbers.values()))

    def runs_in_step(self, fold: Sequence[int]) -> int:
        """How often sections of `fold` run in a step, micro-steps included."""
        return sum(self.step.runs(self.step.sections[number]) for number in fold)

    def fold_s(self, fold: Sequence[int]) -> float:
        """Seconds of all these runs."""
        return self.runs_in_step(fold) * self.step.sections[fold[0]].price.predicted_s

    @cached_property
    def model_flops(self) -> int:
        """FLOPs of matrix products, convolutions, attention and recurrent layers in a step, without recomputation."""
        step, graph, program = self.step, self.prediction.graph, self.prediction.program
        types = graph.types(program.symbols)
        made_again = sum(flops_of(node, types) for node in graph.nodes if node.name.endswith(MADE_AGAIN))
        all_flops = sum(step.runs(section) * section.load.product_flops for section in step.sections)
        return all_flops - step.micro_steps * made_again * step.batch_size // program.batch_size

    @property
    def mfu(self) -> float:
        """Model FLOPs of a step over its whole time, host included, as a share of the peak of the tiles in use."""
        return self.model_flops / self.step.predicted_s / self.published.flops_per_s

    @property
    def mfu_text(self) -> str:
        """Of what the MFU is a share, without its unit."""
        flops, peak = map(format_count, (self.model_flops, self.published.flops_per_s))
        return f"{flops}FLOP of products a step, without recomputation; its tiles have {peak}FLOP/s"

    @property
    def reachable(self) -> Roof:
        """By the calibration: the units that operators are placed on, at the rate of the fastest kind of product."""
        step, budget = self.step, self.step.budget
        products = (product for section in step.sections for product in section.load.products)
        rate = max((product.flops / product.unit_s for product in products), default=budget.unit_flops_per_s)
        return Roof(budget.placeable_units * rate, slowed(budget, step.tiers.rest).memory_bytes_per_s)

    @property
    def published(self) -> Roof:
        device, tiles = self.prediction.device, self.prediction.tiles
        share = 1.0 if tiles is None or device.tiles is None else tiles / device.tiles
        memory = device.hbm_bandwidth_bytes_per_s or device.ddr_bandwidth_bytes_per_s
        return Roof(device.peak_bf16_flops_per_s * share, memory * share)

    @property
    def roofs_text(self) -> str:
        limit = f"{self.step.budget.memory} is the limit of a section below {format_rate(self.reachable.ridge)} FLOPs"
        return f"{self.reachable} reachable, of {self.published} published; {limit} per byte"
