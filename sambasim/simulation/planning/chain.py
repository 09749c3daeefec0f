"""The layers of a step in order, and how a pipeline cuts them into stages."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any

from sambasim.costs.price import alone_s
from sambasim.costs.work import Work, stage_ranges
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.simulation.alone import MODEL_KINDS, RankAlone


@dataclass(frozen=True, slots=True)
class Shorter:
    """A program with those of `layers` repeated layers that begin at the operators called `starts`, one name each;
    `end` is the first operator behind them."""

    program: Program
    layers: int
    starts: tuple[str, ...]
    end: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Operators of the forward and the backward of what they compute, for one pass: seconds with the host and messages,
    those of the backward that gradients of weights take, the bytes that go to the next one and how many tensors these
    are, the bytes that the backward reads, and the elements of parameters that it is the first to read."""

    forward_s: float
    backward_s: float
    weights_s: float
    crossing_bytes: int
    crossing: int
    kept_bytes: int
    numel: int


@dataclass(frozen=True)
class Chain:
    """The layers of a step in order, and how many of them each stage of a pipeline has. `priced_bytes`: what the
    program from which they are keeps for its backward; it may have fewer layers."""

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


def chain_of(
    step: RankAlone,
    work: Work,
    messages_s: Sequence[float],
    numel_of: Mapping[str, int],
    shorter: Shorter | None = None,
) -> Chain:
    """The layers of `step`, whose passes have this `work`. `messages_s` are the seconds of each section's messages,
    `numel_of` the elements of each trained parameter. If it is the step of a `shorter` program, those that this has are
    repeated."""
    seconds = _by_operator(step, work, messages_s)
    end = max(section.nodes[1] for section in step.sections if section.kind is SectionKind.FWD)
    count = sum(stage.node < end for stage in work.stages)
    values = _Values(work, count, numel_of)
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


def _by_operator(step: RankAlone, work: Work, messages_s: Sequence[float]) -> list[float]:
    """The seconds of each operator: that of its section, divided by what operators take alone."""
    sections = [section for section in step.sections if section.kind in MODEL_KINDS]
    found: list[float] = []
    ranges = stage_ranges(work, [section.nodes[1] for section in sections])
    for (start, stop), section, more_s in zip(ranges, sections, messages_s, strict=True):
        weights = [alone_s(stage, work, step.budget) for stage in work.stages[start:stop]]
        whole = section.price.predicted_s + step.start_s + more_s
        found += [whole * weight / (sum(weights) or 1.0) for weight in weights]
    return found


class _Values:
    """What the operators of the forward, `count` of them, make and read. By operator: the elements of parameters that
    it is the first to read, the bytes and the number of tensors that cross behind it, and the bytes of its results
    that the backward reads. `near`: which operator makes a value."""

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


_ENOUGH_PLACES = 128
_SUMMED = ("forward_s", "backward_s", "weights_s", "kept_bytes", "numel")


def _layers(operators: Sequence[Layer]) -> Iterator[Layer]:
    """Operators up to the next place where few tensors cross, together."""
    counts = sorted(layer.crossing for layer in operators[:-1] if layer.crossing > 0)
    most = counts[min(_ENOUGH_PLACES, len(counts) - 1)] if counts else 0
    start = 0
    for stop, layer in enumerate(operators, 1):
        if 0 < layer.crossing <= most or stop == len(operators):
            span = operators[start:stop]
            sums: dict[str, Any] = {name: sum(getattr(each, name) for each in span) for name in _SUMMED}
            yield replace(layer, **sums)
            start = stop
