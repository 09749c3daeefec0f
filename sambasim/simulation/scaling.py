"""A step of many replicas, which waits for the slowest. By rdu, a gradient group is reduced as soon as its section
ends, each replica updates its slice, then GATHER; between nodes, each piece of a group by itself, and parameters may
arrive as late as the next forward reads them: the wait for them counts as the end of the step. By host, the same after
the backward, or with ZeRO 0 every replica updates everything; ZeRO 2 and 3 are nodes of passes, for which sections
wait. Transfers do not slow sections down."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from statistics import NormalDist

from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import is_clipped, readiness
from sambasim.ir.graph import SectionKind
from sambasim.simulation.alone import RankAlone, TimedSection, sliced
from sambasim.simulation.sync import (
    GATHERS_IN_PASSES,
    GroupSync,
    SyncPath,
    Traffic,
    moves_in_passes,
    pieces_of_syncs,
    syncs_of,
    zero_of,
)


class Track(StrEnum):
    HOST = "host"
    SECTIONS = "sections"
    LINKS = "links"


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the step began, of all replicas. `kind`: of a section, or `HOST`; `section`: its number. A GATHER
    may end while the next step computes."""

    track: Track
    kind: str
    name: str
    start_s: float
    stop_s: float
    section: int | None = None

    @property
    def predicted_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class SyncedRank:
    """One rank of each of several replicas: its `step`, and what is `moved` for sync, which takes `exposed_sync_s`
    longer, `slowest_s` of it for the slowest replica. `path`: None without sync; `way`: how gradients are sent;
    `ideal_s`: the step of replicas that share the update and never wait."""

    step: RankAlone
    path: SyncPath | None
    spans: tuple[Span, ...]
    moved: Traffic
    exposed_sync_s: float
    way: str
    slowest_s: float
    ideal_s: float

    @property
    def sync_s(self) -> float:
        return self.moved.predicted_s

    @cached_property
    def predicted_s(self) -> float:
        return self.step.predicted_s + self.exposed_sync_s

    @property
    def hidden_sync_s(self) -> float:
        return max(self.sync_s + self.slowest_s - self.exposed_sync_s, 0.0)  # but for rounding

    @property
    def sync_share(self) -> float:
        """The fraction of the step in which sections wait for sync."""
        return self.exposed_sync_s / self.predicted_s

    def times_s(self, kind: SectionKind) -> list[float]:
        """Of one run of each section of `kind`; of REDUCE and GATHER, of each transfer."""
        if kind in (SectionKind.REDUCE, SectionKind.GATHER):
            return [span.predicted_s for span in self.spans if span.track is Track.LINKS and span.kind == kind]
        return [section.price.predicted_s for section in self.step.sections if section.kind is kind]


def with_sync(alone: RankAlone, placement: Placement, path: SyncPath) -> SyncedRank:
    """The rank in each replica of `placement`. RDUs sync through the host where that is quicker. In replicas of several
    ranks, groups are reduced after passes, and the caller counts what is gathered in them."""
    if placement.replicas == 1 or alone.program.training is None:
        return _by_host(alone, placement, None, 0)
    zero = zero_of(alone.program)
    if path is SyncPath.HOST:
        return _by_host(alone, placement, path, zero)
    synced = by_rdu(sliced(alone, placement.replicas), placement)
    by_host = _by_host(alone, placement, SyncPath.HOST, min(1, zero))
    if by_host.predicted_s < synced.predicted_s:
        return replace(by_host, path=SyncPath.RDU, way="through the host, which is quicker here")
    return synced


def by_rdu(step: RankAlone, placement: Placement) -> SyncedRank:
    """Of a rank that updates its slice."""
    program, slowest_s = step.program, slowest_s_of(step, placement.replicas)
    pieces, latency_s = pieces_of_syncs(step, placement)
    spans = [_host(step)]
    for _ in range(step.micro_steps):
        spans += _run(step.model, spans[-1].stop_s)
    ends_s, met_s = [span.stop_s for span in spans[-len(step.model) :]], spans[-1].stop_s + slowest_s
    ready = readiness(replace(program, groups=tuple(piece.group for piece in pieces.values())))
    ready_s = {name: ends_s[: of.reduce][-1] + slowest_s for name, of in ready.items()}
    reduces = {name: pieces[name].sync.reduce for name in sorted(pieces, key=lambda name: ready_s[name])}
    reduced = on_links(SectionKind.REDUCE, reduces, ready_s, latency_s)
    first_reader = {name: next((at for at in of.readers if at < len(step.model)), 0) for name, of in ready.items()}
    in_order = sorted(pieces, key=lambda name: first_reader[name])
    reduced_s = {span.name: max(met_s, span.stop_s) for span in reduced}
    if placement.nodes > 1 and not is_clipped(program) and program.count is None:  # each piece by itself
        sections = {name: len(step.model) + pieces[name].number for name in in_order}
        seconds = {name: pieces[name].share * step.sections[at].price.predicted_s for name, at in sections.items()}
        turns = _in_turn(seconds, reduced_s, free_s=met_s)
        updates = [Span(Track.SECTIONS, SectionKind.OPT, *turn, section=sections[turn[0]]) for turn in turns]
        updated_s = {span.name: span.stop_s for span in updates}
    else:
        updates = _run(step.update, max([met_s, *reduced_s.values()]), len(step.model))
        updated_s = dict.fromkeys(pieces, updates[-1].stop_s)
    gathers = {name: pieces[name].sync.gather for name in in_order}
    gathered = on_links(SectionKind.GATHER, gathers, updated_s, latency_s, max(reduced_s.values()))
    # Replicas apart wait for parameters where the next forward reads them; then links are free for gradients.
    in_time_s = {name: min(spans[1 + at].start_s, reduced[0].start_s) for name, at in first_reader.items()}
    late_s = [span.stop_s - (in_time_s[span.name] if placement.apart else 0.0) for span in gathered]
    stop_s = max(updates[-1].stop_s, *late_s)
    whole = sum((piece.sync.reduce + piece.sync.gather for piece in pieces.values()), Traffic())
    moved = replace(whole, predicted_s=sum(span.predicted_s for span in (*reduced, *gathered)))
    path, all_spans, ideal_s = SyncPath.RDU, (*spans, *reduced, *updates, *gathered), step.predicted_s
    way = "; ".join(dict.fromkeys(piece.sync.ways for piece in pieces.values()))
    exposed_s = max(stop_s - step.predicted_s, 0.0)  # but for rounding
    return SyncedRank(step, path, all_spans, moved, exposed_s, way, slowest_s, ideal_s)


def _by_host(alone: RankAlone, placement: Placement, path: SyncPath | None, zero: int) -> SyncedRank:
    """Sections wait for all transfers; without a `path` there are none."""
    syncs = {} if path is None else syncs_of(alone, placement, path, zero)
    program, of_slice = alone.program, sliced(alone, placement.replicas)
    step = of_slice if zero else alone
    moves = moves_in_passes(program) if zero > 1 and program.ranks_of_replica == 1 else []
    slowest_s, waited_s = slowest_s_of(alone, placement.replicas) if syncs else 0.0, 0.0
    spans, moved = [_host(step)], Traffic()

    def transfer(kind: SectionKind, names: Iterable[str]) -> None:
        nonlocal moved
        groups = {name: syncs[name].reduce if kind is SectionKind.REDUCE else syncs[name].gather for name in names}
        spans.extend(on_links(kind, groups, dict.fromkeys(groups, max(spans[-1].stop_s, waited_s))))
        moved = sum(groups.values(), moved)

    for micro_step in range(step.micro_steps):
        for number, section in enumerate(step.model):
            if moves:
                transfer(SectionKind.GATHER, moves[number].gathered)
            spans += _run([section], spans[-1].stop_s, number)
            if moves and micro_step == step.micro_steps - 1:
                transfer(SectionKind.REDUCE, moves[number].reduced)
    reduced = {name for each in moves for name in each.reduced}
    waited_s = spans[-1].stop_s + slowest_s
    transfer(SectionKind.REDUCE, [name for name in syncs if name not in reduced])
    spans += _run(step.update, max(spans[-1].stop_s, waited_s), len(step.model))
    if zero < GATHERS_IN_PASSES:
        transfer(SectionKind.GATHER, syncs)
    ideal_s, exposed_s = of_slice.predicted_s if syncs else alone.predicted_s, moved.predicted_s + slowest_s
    return SyncedRank(step, path, tuple(spans), moved, exposed_s, _ways(syncs), slowest_s, ideal_s)


def _ways(syncs: Mapping[str, GroupSync]) -> str:
    return "; ".join(dict.fromkeys(sync.ways for sync in syncs.values()))


def slowest_s_of(alone: RankAlone, replicas: int) -> float:
    """How much longer the slowest replica takes than their mean; of several micro-steps, one counts."""
    model_s = sum(section.price.predicted_s for section in alone.model)
    return alone.budget.spread * model_s * spread_of(replicas)


@cache
def spread_of(replicas: int) -> float:
    """By how many standard deviations the slowest of `replicas` exceeds their mean, if normal (Blom 1958)."""
    return NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25)) if replicas > 1 else 0.0


def _host(step: RankAlone) -> Span:
    return Span(Track.HOST, "HOST", "inputs, outputs, starting sections", 0.0, step.host_s)


def _run(sections: Sequence[TimedSection], start_s: float, first: int = 0) -> list[Span]:
    spans = []
    for number, section in enumerate(sections, first):
        stop_s = start_s + section.price.predicted_s
        spans.append(Span(Track.SECTIONS, section.kind, section.name, start_s, stop_s, number))
        start_s = stop_s
    return spans


def on_links(
    kind: SectionKind,
    groups: Mapping[str, Traffic],
    ready_s: Mapping[str, float],
    latency_s: float = 0.0,
    free_s: float = 0.0,
) -> list[Span]:
    """One transfer after another: see `_in_turn`."""
    seconds = {name: traffic.predicted_s for name, traffic in groups.items() if traffic.predicted_s}
    return [Span(Track.LINKS, kind, *turn) for turn in _in_turn(seconds, ready_s, latency_s, free_s)]


def _in_turn(
    seconds: Mapping[str, float], ready_s: Mapping[str, float], latency_s: float = 0.0, free_s: float = 0.0
) -> Iterator[tuple[str, float, float]]:
    """What begins and ends when, one after another: of those that are ready, the first. A message is on its way for
    `latency_s` at least, also while others arrive."""
    waiting = dict(seconds)
    while waiting:
        start_s = max(free_s, min(ready_s[name] for name in waiting))
        name = next(name for name in waiting if ready_s[name] <= start_s)
        free_s = max(start_s, ready_s[name] + latency_s) + waiting.pop(name)
        yield name, start_s, free_s
