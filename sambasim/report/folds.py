"""Equal sections of a step, such as those of layers that repeat."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from sambasim.ir.graph import Graph
from sambasim.simulation.alone import RankAlone


@dataclass(frozen=True, slots=True)
class Run:
    """Sections `start` up to `stop`, which are `count` times `period` sections. A section that does not repeat is a run
    of one."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


@dataclass(frozen=True, slots=True)
class Fold:
    """The numbers of equal sections, of any runs."""

    numbers: tuple[int, ...]


def runs_of_step(step: RankAlone, graph: Graph) -> tuple[Run, ...]:
    return tuple(runs_of(_keys(step, graph)))


def folds_of(step: RankAlone, graph: Graph) -> tuple[Fold, ...]:
    """Each section is in one fold; in the order of their first sections."""
    numbers: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, key in enumerate(_keys(step, graph)):
        numbers[key].append(number)
    return tuple(Fold(tuple(equal)) for equal in numbers.values())


def _keys(step: RankAlone, graph: Graph) -> list[Hashable]:
    def operators(start: int, stop: int) -> tuple[Hashable, ...]:
        return tuple((node.operator, node.source) for node in graph.nodes[start:stop])

    return [(one.kind, one.load, one.price, operators(*one.nodes)) for one in step.sections]


def runs_of(keys: Sequence[Hashable]) -> list[Run]:
    """From the start, always the run that covers most, with the shortest period."""
    number_of: dict[Hashable, int] = {}
    numbers = [number_of.setdefault(key, len(number_of)) for key in keys]
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers):
        places[number].append(place)
    found: list[Run] = []
    start = 0
    while start < len(numbers):
        found.append(_longest(numbers, start, places))
        start = found[-1].stop
    return found


def _longest(numbers: Sequence[int], start: int, places: Mapping[int, Sequence[int]]) -> Run:
    best = Run(start, 1, 1)
    for again in places[numbers[start]]:
        period = again - start
        if period <= 0 or again + period > len(numbers):
            continue
        one, count = numbers[start:again], 1
        while numbers[start + count * period : start + (count + 1) * period] == one:
            count += 1
        if count > 1 and period * count > best.period * best.count:
            best = Run(start, period, count)
    return best
