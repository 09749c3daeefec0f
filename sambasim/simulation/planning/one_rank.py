"""One rank that has all layers: what a pass of some samples, its memory and its update cost, from which strategies are
estimated; and its operators as a chain of layers that a pipeline may cut.

layers     of a model with many repeated ones, few are compiled and priced
samples    1, 8, 64, 512, … are priced, with recomputation of sections also 2 and 4; the others are interpolated
operators  take their share of their section; one of the backward belongs to the stage whose activations it reads
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any, Protocol, TypeAlias

from sambasim.costs.fit import Memory
from sambasim.costs.price import alone_s
from sambasim.costs.work import Work, at_batch_size, stage_ranges, work_of
from sambasim.errors import SambasimError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR, Mesh
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind
from sambasim.simulation.alone import RankAlone, price_alone
from sambasim.simulation.machine import mixed
from sambasim.simulation.memory import memory_of
from sambasim.simulation.planning.strategy import Strategy, roomy
from sambasim.simulation.scaling import slowest_s_of
from sambasim.simulation.sync import Traffic, traffic_of


@dataclass(frozen=True, slots=True)
class Shorter:
    """A program with the repeated layers that begin at operators `starts`, of `layers`; `end` is behind them."""

    program: Program
    layers: int
    starts: tuple[str, ...]
    end: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Operators and their backward, in a pass: seconds with host and messages, `weights_s` for gradients of weights;
    bytes and number of tensors that go to the next layer; bytes that the backward reads; elements of parameters."""

    forward_s: float
    backward_s: float
    weights_s: float
    crossing_bytes: int
    crossing: int
    kept_bytes: int
    numel: int


@dataclass(frozen=True)
class Chain:
    """The layers of a step. `priced_bytes`: what the program they are of keeps for its backward; it may have fewer."""

    layers: tuple[Layer, ...]
    priced_bytes: int

    @cached_property
    def places(self) -> Sequence[Sequence[int]]:
        """Where at most 1, 2, … tensors cross, so that each piece has parameters."""
        largest = max((layer.crossing for layer in self.layers[:-1]), default=0)
        left = list(accumulate((layer.numel for layer in reversed(self.layers)), initial=0))[::-1]
        of_most = []
        for most in range(1, largest + 1):
            found = [0]
            for at, layer in enumerate(self.layers[:-1], 1):
                if 0 < layer.crossing <= most and left[found[-1]] > left[at] > 0:
                    found.append(at)
            of_most.append([*found, len(self.layers)])
        return of_most

    @property
    def most_stages(self) -> int:
        return max((len(places) - 1 for places in self.places), default=1)

    def cut(self, stages: int) -> Sequence[tuple[int, int]] | None:
        """The range of layers of each stage, the slowest forward as fast as possible; None for too many stages."""
        if stages == 1:
            return [(0, len(self.layers))]
        places = next((places for places in self.places if len(places) > stages), None)
        if places is None:
            return None
        total_s = list(accumulate((layer.forward_s for layer in self.layers), initial=0.0))
        at_s = [total_s[place] for place in places]
        low, high = at_s[-1] / stages, at_s[-1]
        ends = _ends(at_s, stages, high)
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            tried = _ends(at_s, stages, middle)
            low, high, ends = (low, middle, tried) if tried is not None else (middle, high, ends)
        if ends is None:
            return None
        cuts = [places[end] for end in ends]
        return list(zip([0, *cuts], cuts, strict=False))


def _ends(at_s: Sequence[float], stages: int, most_s: float) -> Sequence[int] | None:
    """Where `stages` stages of at most `most_s` seconds end; the first ones are as long as possible."""
    ends, start = [], 0
    for stage in range(stages):
        left = stages - stage - 1
        stop = min(bisect_left(at_s, at_s[start] + most_s * (1 + 1e-9)), len(at_s))
        stop = max(start + 1, min(stop - 1 if stop < len(at_s) else stop, len(at_s) - 1 - left))
        if at_s[stop] - at_s[start] > most_s * (1 + 1e-6):
            return None
        ends.append(stop)
        start = stop
    return ends if start == len(at_s) - 1 else None


def chain_of(step: RankAlone, messages_s: Sequence[float], shorter: Shorter | None) -> Chain:
    """The layers of `step`, with `messages_s` of each section. If it is the step of a `shorter` program, the layers
    that this has are repeated."""
    work, seconds = step.work, _by_operator(step, messages_s)
    end = max(section.nodes[1] for section in step.model if section.kind is SectionKind.FWD)
    count = sum(stage.node < end for stage in work.stages)
    values = _Values(work, count, numel_of(step.program))
    backward_s, weights_s = [0.0] * count, [0.0] * count
    at = count - 1
    for number in range(count, len(work.stages)):
        # Gradients flow backwards: no operator belongs to a later one than the operator before it.
        read = [values.near[read.value] for read in work.stages[number].reads if read.value in values.near]
        at = min(at, max(read, default=at))
        backward_s[at] += seconds[number]
        if work.resident.issuperset(work.stages[number].writes):
            weights_s[at] += seconds[number]
    columns = seconds[:count], backward_s, weights_s, *values.crossing, values.kept_bytes, values.numel
    operators = [Layer(*row) for row in zip(*columns, strict=True)]
    order = range(count) if shorter is None else _repeated(shorter, work, count)
    return Chain(tuple(_layers([operators[number] for number in order])), sum(values.kept_bytes))


def _repeated(shorter: Shorter, work: Work, count: int) -> Sequence[int]:
    """The operators of the forward of the whole model, as numbers of those that are like them."""
    graph = shorter.program.leading
    place_of = {node.name: place for place, node in enumerate(graph.nodes)}
    nodes = [stage.node for stage in work.stages[:count]]
    starts = [bisect_left(nodes, place_of[name]) for name in (*shorter.starts, shorter.end)]
    first, *inner, last = [range(*span) for span in pairwise(starts)]
    # The first and the last one may have more, such as the gradient of the embedding.
    layers = [first, *islice(cycle(inner), shorter.layers - 2), last]
    return [*range(starts[0]), *chain.from_iterable(layers), *range(starts[-1], count)]


def _by_operator(step: RankAlone, messages_s: Sequence[float]) -> list[float]:
    """The seconds of each operator: its section's, divided by what operators take alone."""
    work, found = step.work, list[float]()
    ranges = stage_ranges(work, [section.nodes[1] for section in step.model])
    for (start, stop), section, more_s in zip(ranges, step.model, messages_s, strict=True):
        weights = [alone_s(stage, work, step.budget) for stage in work.stages[start:stop]]
        whole = section.price.predicted_s + step.budget.start_s + more_s
        found += [whole * weight / (sum(weights) or 1.0) for weight in weights]
    return found


def numel_of(program: Program) -> Mapping[str, int]:
    """By trained parameter."""
    return {member.parameter: member.numel for group in program.groups for member in group.members}


class _Values:
    """By operator of the forward, of which there are `count`: elements of parameters that it is the first to read,
    tensors that cross behind it, and bytes that the backward reads. `near`: which operator makes a value."""

    def __init__(self, work: Work, count: int, numel_of: Mapping[str, int]) -> None:
        made: dict[str, int] = {}
        last: dict[str, int] = {}
        owner: dict[str, int] = {}
        for number, stage in enumerate(work.stages[:count]):
            names = [read.value for read in stage.reads]
            for name in names:
                if name in made:
                    last[name] = number
                elif name in numel_of:
                    owner.setdefault(name, number)
            if any(name in made or name in numel_of for name in names):  # else of inputs alone: made again where read
                made.update(dict.fromkeys(stage.writes, number))
        self.numel, self.kept_bytes = [0] * count, [0] * count
        for name, number in owner.items():
            self.numel[number] += numel_of[name]
        crossing_bytes, crossing = [0] * (count + 1), [0] * (count + 1)
        for name, until in last.items():
            for at, sign in ((made[name], 1), (until, -1)):
                crossing_bytes[at] += sign * work.tensors[name].size_bytes
                crossing[at] += sign
        self.crossing = list(accumulate(crossing_bytes))[:count], list(accumulate(crossing))[:count]
        for name in {read.value for stage in work.stages[count:] for read in stage.reads} & made.keys():
            self.kept_bytes[made[name]] += work.tensors[name].size_bytes
        # What crosses much of the model, such as an encoder's result, says nothing of where its readers belong.
        self.near = {name: at for name, at in made.items() if last.get(name, at) - at <= count // 8 + 8}


def joined(layers: Sequence[Layer]) -> Layer:
    """All `layers` as one, behind which crosses what crosses behind the last."""
    summed = ("forward_s", "backward_s", "weights_s", "kept_bytes", "numel")
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in layers) for name in summed}
    return replace(layers[-1], **sums)


def _layers(operators: Sequence[Layer]) -> Iterator[Layer]:
    """Operators up to the next place where few tensors cross, together."""
    counts = sorted(layer.crossing for layer in operators[:-1] if layer.crossing > 0)
    most = counts[min(128, len(counts) - 1)] if counts else 0  # so that there are enough places
    start = 0
    for stop, layer in enumerate(operators, 1):
        if 0 < layer.crossing <= most or stop == len(operators):
            yield joined(operators[start:stop])
            start = stop


class Programs(Protocol):
    """The programs of a model in one dtype. Both raise OptionError for what is impossible."""

    def program(self, strategy: Strategy) -> Program:
        """The program that is compiled for `strategy`."""

    def shorter(self, strategy: Strategy, layers: int, least: int) -> Shorter | None:
        """The same with so many of its repeated layers; None if it has no more, or fewer than `least`."""


ByDtype: TypeAlias = Callable[[str], Programs]

_MANY_LAYERS = 12
_FEW_LAYERS = {"none": (2, 4), "sections": (2, 6)}
"""A model with many repeated layers is priced with few of them, by recomputation, and what a further one adds is added
for the others. Sections that recompute are less regular."""

_CUT_FOR = _APART = 8
"""The most samples for which sections are cut: a pass of more has the same; and the factor between priced numbers."""


@dataclass(frozen=True)
class Compiled:
    program: Program
    shorter: Shorter | None = None

    @cached_property
    def work(self) -> Work:
        return work_of(self.program.leading, self.program.symbols)

    @property
    def sections(self) -> Sequence[Section]:
        return pass_and_update(self.program.leading)[0]

    @cached_property
    def largest_layer_bytes(self) -> int:
        """Of the parameters of one module, their gradients and their states."""
        found = Counter[str]()
        for group in self.program.groups:
            regions = self.program.optimizers[group.optimizer].regions
            element_bytes = sum(DTYPE_BYTES[group.region_type(region).dtype] for region in regions)
            for member in group.members:
                module, _, _ = self.program.symbols[member.parameter].torch_names[0].rpartition(".")
                found[module] += member.numel * element_bytes
        return max(found.values(), default=0)

    @cached_property
    def gathered(self) -> tuple[int, int]:
        """By ZeRO 2 and 3, what is whole for a while: about the largest gradients, and the parameters of two groups."""
        sizes = sorted((group.numel * DTYPE_BYTES[group.dtype] for group in self.program.groups), reverse=True)
        return sum(sizes[:1]), sum(sizes[:1]) + sum(sizes[:2])


@dataclass(frozen=True)
class OneRank:
    """One pass and the update. `sent_s`: of inputs and outputs; `spread_s`: how much longer the slower of two replicas
    takes; `memory`: without ZeRO and activations; `between_bytes`: between sections, but not kept for the backward."""

    chain: Chain
    sections: int
    groups: int
    numel: int
    sent_s: float
    update_s: float
    spread_s: float
    messages: Traffic
    memory: Memory
    between_bytes: int
    gathered: tuple[int, int]
    operand_bytes: int

    def share_of(self, layer: Layer) -> float:
        """Of the parameters."""
        return layer.numel / max(self.numel, 1)


class Ranks:
    def __init__(self, programs: ByDtype, device: DeviceSpec, cluster: ClusterSpec) -> None:
        self._programs, self._device, self._cluster = programs, device, cluster
        self.budget = cache(partial(budget_of, device))
        self._of = cache(self._between)
        self._anchored = cache(self._priced)
        self._compiled = cache(self._made)

    def of(self, strategy: Strategy) -> OneRank | str:
        """The rank of `strategy`, or why it is impossible."""
        cut = strategy if strategy.tensor == "weight" else replace(strategy, tensor="none", chips=1)
        again = "none" if strategy.recompute == "full" else strategy.recompute  # each stage has its own segments
        return self._of(replace(cut, replicas=2, stages=1, zero=1, passes=1, schedule="1f1b", recompute=again))

    def _between(self, alone: Strategy) -> OneRank | str:
        # What sections keep between them depends on the samples for which they are cut.
        closer = 2 if alone.recompute == "sections" and alone.tiles is None else _APART
        low, high = 1, closer
        while high <= alone.samples:
            low, high = high, high * (closer if high < _CUT_FOR else _APART)
        found = self._anchored(replace(alone, samples=low))
        if low == alone.samples or isinstance(found, str):
            return found
        more = self._anchored(replace(alone, samples=high))
        return more if isinstance(more, str) else mixed(found, more, (alone.samples - low) / (high - low))

    def _priced(self, alone: Strategy) -> OneRank | str:
        compiled = self._compiled(replace(alone, samples=min(alone.samples, _CUT_FOR)))
        if isinstance(compiled, str):
            return compiled
        ranks = [self._one_rank(alone, each) for each in compiled]
        found, shorter = ranks[-1], compiled[-1].shorter
        if shorter is None:
            return found
        few, more = _FEW_LAYERS[alone.recompute]
        low, high = (replace(rank, chain=Chain((), 0)) for rank in ranks)
        whole = mixed(low, high, (shorter.layers - few) / (more - few))
        between_bytes = max(whole.between_bytes, 0)
        return replace(whole, chain=found.chain, between_bytes=between_bytes, gathered=found.gathered)

    def _made(self, alone: Strategy) -> Sequence[Compiled] | str:
        """The whole program, or two with few layers, if these show what one costs: its sections and parameters."""
        try:
            counts, programs = _FEW_LAYERS[alone.recompute], self._programs(alone.dtype)
            shorter = [programs.shorter(alone, count, _MANY_LAYERS) for count in counts]
            found = [Compiled(each.program, each) for each in shorter if each is not None]
            if len(found) == len(counts):
                few, more = found
                grown = len(more.sections) - len(few.sections)  # of the forward and of the backward
                has_own = sum(numel_of(more.program).values()) > sum(numel_of(few.program).values())
                if grown >= 2 * (counts[1] - counts[0]) and has_own:
                    return found
            return [Compiled(programs.program(alone))]
        except SambasimError as error:  # a model may not be captured in each dtype
            return error.what

    def _one_rank(self, alone: Strategy, compiled: Compiled) -> OneRank:
        program, samples = compiled.program, alone.samples
        budget = replace(roomy(self.budget(alone.tiles)), behind=None)
        sections = compiled.sections
        step = price_alone(program, at_batch_size(compiled.work, program.batch_size, samples), budget, samples)
        found = [Traffic()] * len(sections)
        if alone.chips > 1:
            placement = place(alone.chips, self._device, None, self._cluster)
            mesh = Mesh({DATA_PARALLEL: 1, TENSOR: alone.chips})
            for number, section in enumerate(sections):
                found[number] = traffic_of([section], step, placement, mesh, 0).get(TENSOR, Traffic())
        chain = chain_of(step, [traffic.predicted_s for traffic in found], compiled.shorter)
        return OneRank(
            chain,
            sections=len(sections),
            groups=len(program.groups),
            numel=sum(numel_of(program).values()),
            sent_s=step.sent_s,
            update_s=sum(section.price.predicted_s for section in step.update),
            spread_s=slowest_s_of(step, 2),
            messages=sum(found, Traffic()),
            memory=memory_of(program, samples=samples),
            between_bytes=max(step.need.residency.size_bytes - chain.priced_bytes, 0),
            gathered=compiled.gathered,
            operand_bytes=program.held_bytes(SymbolKind.REDUCE_BUFFER),
        )

    def largest_layer_bytes(self, dtype: str) -> int | None:
        """Without cuts; None if it cannot be compiled."""
        compiled = self._compiled(Strategy(2, dtype=dtype))
        return None if isinstance(compiled, str) else compiled[-1].largest_layer_bytes
