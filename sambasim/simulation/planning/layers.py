"""The sections of a step as a chain that a pipeline may cut: what each costs, keeps and hands on.

An estimate: a stage has whole sections of the step of a replica without stages, and a backward section belongs to the
stage whose activations it reads.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from sambasim.costs.work import Work, stage_ranges
from sambasim.ir.graph import SectionKind
from sambasim.simulation.step import MODEL_KINDS, PredictedStep


@dataclass(frozen=True, slots=True)
class Layer:
    """A forward section and the backward of what it computes, for one pass: seconds with the host and messages, the
    bytes that go to the next one and how many tensors these are, the bytes that the backward reads, and the elements
    of parameters that it is the first to read."""

    forward_s: float
    backward_s: float
    crossing_bytes: int
    crossing: int
    kept_bytes: int
    numel: int


@dataclass(frozen=True)
class Chain:
    """The layers of a step in order, and how many of them each stage of a pipeline has."""

    layers: tuple[Layer, ...]

    @cached_property
    def places(self) -> Sequence[Sequence[int]]:
        """Where at most 1, 2, … tensors cross, so that each piece has parameters."""
        largest = max((one.crossing for one in self.layers[:-1]), default=0)
        return [self._places(most) for most in range(1, largest + 1)]

    def _places(self, most: int) -> Sequence[int]:
        found, owned = [0], 0
        left = sum(one.numel for one in self.layers)
        for at, one in enumerate(self.layers[:-1], 1):
            owned += one.numel
            left -= one.numel
            if 0 < one.crossing <= most and owned and left:
                found.append(at)
                owned = 0
        return [*found, len(self.layers)]

    @property
    def most_stages(self) -> int:
        return max((len(places) - 1 for places in self.places), default=1)

    def cut(self, stages: int) -> Sequence[tuple[int, int]] | None:
        """The range of layers of each stage, the slowest forward as fast as possible; None for too many stages."""
        if stages == 1:
            return [(0, len(self.layers))]
        places = next((one for one in self.places if len(one) > stages), None)
        if places is None:
            return None
        total_s = list(accumulate((one.forward_s for one in self.layers), initial=0.0))
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


def chain_of(step: PredictedStep, work: Work, messages_s: Sequence[float], numel_of: Mapping[str, int]) -> Chain:
    """The layers of `step`, whose passes have this `work`. `messages_s` are the seconds of each section's messages,
    `numel_of` the elements of each trained parameter."""
    sections = [one for one in step.sections if one.kind in MODEL_KINDS]
    count = sum(one.kind is SectionKind.FWD for one in sections)
    made: dict[str, int] = {}  # by value of the forward: its layer
    last: dict[str, int] = {}  # the last layer whose forward reads it
    saved: set[str] = set()
    owner: dict[str, int] = {}
    latest: list[int | None] = [None] * len(sections)
    ends = [one.nodes[1] for one in sections]
    for number, (start, stop) in enumerate(stage_ranges(work, ends)):
        for stage in work.stages[start:stop]:
            for read in stage.reads:
                if number >= count:
                    if read.value in made:
                        saved.add(read.value)
                        latest[number] = max(latest[number] or 0, made[read.value])
                elif read.value in made:
                    last[read.value] = number
                elif read.value in numel_of:
                    owner.setdefault(read.value, number)
            if number < count:
                made.update((value, number) for value in stage.writes if not work.tensors[value].resident)
    seconds = [one.price.predicted_s + step.start_s + more for one, more in zip(sections, messages_s, strict=True)]
    backward_s, at = [0.0] * count, count - 1
    for number in range(count, len(sections)):
        # Gradients flow backwards: no section belongs to a later layer than the one before it.
        newest = latest[number]
        at = at if newest is None else min(at, newest)
        backward_s[at] += seconds[number]
    kept_bytes, crossing_bytes, crossing, numel = [0] * count, [0] * count, [0] * count, [0] * count
    for value in saved:
        kept_bytes[made[value]] += work.tensors[value].size_bytes
    for value, until in last.items():
        for layer in range(made[value], until):
            crossing_bytes[layer] += work.tensors[value].size_bytes
            crossing[layer] += 1
    for value, layer in owner.items():
        numel[layer] += numel_of[value]
    facts = zip(seconds[:count], backward_s, crossing_bytes, crossing, kept_bytes, numel, strict=True)
    return Chain(tuple(Layer(*one) for one in facts))
