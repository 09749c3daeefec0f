"""Cuts a graph into sections: at o0 one operator each, at o1 the fastest predicted cut with at most 8 neighbouring
operators of one module, at o3 the fastest of all, with at most 64. Operators share a section
if compute units and the chip suffice and none needs the whole batch first. A view belongs to the section after it."""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias

from sambasim.costs.price import GrowingLoad, chip_bytes, price_of
from sambasim.costs.work import Stage, Work
from sambasim.hardware.budget import Budget
from sambasim.ir.dataflow import actions_of, is_view, pass_and_update
from sambasim.ir.graph import Graph, Node, Section

Level: TypeAlias = Literal["o0", "o1", "o3"]

MOST_OF_A_MODULE = 8

MOST_STAGES = 64
"""Of a section. The time to fill a longer pipeline exceeds what fewer sections save; and a cut takes less time."""


def cut(graph: Graph, work: Work, budget: Budget, level: Level) -> Graph:
    """`graph`, with its pass cut again within its present boundaries of forward, backward and pipeline stages."""
    in_pass, update = pass_and_update(graph)
    parts = actions_of(in_pass)
    part_ends = [sum(stage.node < part.stop for stage in work.stages) for part in parts]
    last_ends = sorted({*part_ends, len(work.stages)} - {0})
    limits = [last_ends[bisect_right(last_ends, start)] for start in range(len(work.stages))]
    ends = list(range(1, len(work.stages) + 1))
    if level != "o0":
        allowed = _within_modules(graph, work, limits) if level == "o1" else limits
        ends = best_cut(work, budget, allowed)
    found: list[Section] = []
    for part, (start, stop) in zip(parts, pairwise([0, *part_ends]), strict=True):
        begins = (work.stages[end].node for end in ends if start < end < stop)
        for begin, end in pairwise([part.start, *begins, part.stop]):
            name = _name(graph.nodes[begin:end])
            found.append(replace(part, index=len(found), name=name, start=begin, stop=end))
    return replace(graph, sections=(*found, *update))


def _within_modules(graph: Graph, work: Work, limits: Sequence[int]) -> list[int]:
    modules = [graph.nodes[stage.node].module for stage in work.stages]
    found = list(limits)
    for start in reversed(range(len(modules) - 1)):
        end = found[start + 1] if modules[start] == modules[start + 1] else start + 1
        found[start] = min(limits[start], end)
    return [min(end, start + MOST_OF_A_MODULE) for start, end in enumerate(found)]


def best_cut(work: Work, budget: Budget, limits: Sequence[int]) -> list[int]:
    """Where the sections of the fastest cut end, in stages; one that begins at n ends at `limits[n]` at the latest."""
    count = len(work.stages)
    least_s, begins = [0.0] + [float("inf")] * count, [0] * (count + 1)
    known = known_for(budget)
    patterns = _patterns(work, known.numbers)
    for start in range(count):
        window = patterns[start : min(limits[start], start + MOST_STAGES)]
        for stop, seconds in enumerate(_sections_from(work, budget, start, window, known), start + 1):
            if least_s[start] + seconds < least_s[stop]:
                least_s[stop], begins[stop] = least_s[start] + seconds, start
    ends, stop = [], count
    while stop:
        ends.append(stop)
        stop = begins[stop]
    if known.count > 300_000:  # about 100 MB
        known_for.cache_clear()
    return ends[::-1]


@dataclass(slots=True)
class Longer:
    """The seconds of a section, None if it cannot be one, and the sections longer by a stage, by its pattern."""

    seconds: float | None
    longer: "dict[int, Longer]" = field(default_factory=dict)


@dataclass(slots=True)
class Known:
    """Numbers of the patterns of stages, and all sections so far: layers, and programs of a plan, are much alike."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    longer: dict[int, Longer] = field(default_factory=dict)
    count: int = 0


@lru_cache(maxsize=8)
def known_for(budget: Budget) -> Known:
    return Known()


def _sections_from(work: Work, budget: Budget, start: int, window: tuple[int, ...], known: Known) -> Iterator[float]:
    """The seconds of sections from `start` with one stage, two and so on, while they can be one; extends `known`."""
    sections, found = known.longer, 0
    for pattern in window:
        section = sections.get(pattern)
        if section is None:
            break
        if section.seconds is None:
            return
        yield section.seconds
        found, sections = found + 1, section.longer
    if found == len(window):
        return
    growing = GrowingLoad(work, start, budget)
    for _ in range(found):
        growing.take()
    for number, pattern in enumerate(window[found:], start + found):
        seconds = _with(growing, work.stages[number], budget)
        sections[pattern] = Longer(seconds)
        known.count += 1
        if seconds is None:
            return
        yield seconds
        sections = sections[pattern].longer


def _with(growing: GrowingLoad, stage: Stage, budget: Budget) -> float | None:
    """The seconds of the section `growing` with `stage`, None if that does not fit. A stage alone always does."""
    is_alone = not growing.stages
    if not is_alone and not growing.can_take(stage):
        return None
    growing.take()
    load = growing.load()
    if not is_alone and chip_bytes(load, budget) > budget.chip_bytes:
        return None
    return price_of(load, budget).predicted_s + budget.start_s


def _patterns(work: Work, numbers: dict[Hashable, int]) -> tuple[int, ...]:
    """A number for each stage, from `numbers` or added: equal sequences of at most `MOST_STAGES` cost the same."""
    made: dict[str, int] = {}
    read_at: dict[tuple[str, str], int] = {}
    last = work.last_reader

    def away(here: int, there: int | None) -> int | None:
        return None if there is None or abs(there - here) >= MOST_STAGES else there - here

    def pattern(here: int, stage: Stage) -> Hashable:
        reads = []
        for read in stage.reads:
            before = (made.get(read.value), read_at.get((read.value, "")), read_at.get((read.value, read.view)))
            reads.append((work.tensors[read.value], read.part, *(away(here, there) for there in before)))
        written = ((value, work.tensors[value]) for value in stage.writes)
        writes = [(tensor, name in work.kept, name in last, away(here, last.get(name))) for name, tensor in written]
        made.update(dict.fromkeys(stage.writes, here))
        for read in stage.reads:
            read_at[read.value, ""] = read_at[read.value, read.view] = here
        return stage.product_flops, stage.blocks, stage.columns, stage.needs_all, tuple(reads), tuple(writes)

    found = (pattern(here, stage) for here, stage in enumerate(work.stages))
    return tuple(numbers.setdefault(key, len(numbers)) for key in found)


def _name(piece: Sequence[Node]) -> str:
    """The name of the first operator that belongs to a module and is no view, as SambaFlow names sections."""
    of_modules = [node for node in piece if node.module]
    working = (node for node in of_modules if not is_view(node))
    return next(working, next(iter(of_modules), piece[0])).name
