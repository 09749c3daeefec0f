"""A step of many replicas, which waits for the slowest. By rdu, a gradient group is reduced as soon as its section
ends, each replica updates its slice, then GATHER; by host, the same after the backward, or with ZeRO 0 every replica
updates everything; ZeRO 2 and 3 are nodes of passes, for which sections wait. Transfers do not slow sections down."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from statistics import NormalDist

from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import readiness
from sambasim.ir.graph import SectionKind
from sambasim.simulation.alone import RankAlone, TimedSection, sliced
from sambasim.simulation.sync import GATHERS_IN_PASSES, GroupSync, SyncPath, Traffic, moves_in_passes, syncs_of, zero_of


class Track(StrEnum):
    HOST = "host"
    SECTIONS = "sections"
    LINKS = "links"


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the step began, of all replicas. `kind`: of a section, or `HOST`; `section`: its number."""

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
    synced, by_host = _by_rdu(alone, placement), _by_host(alone, placement, SyncPath.HOST, min(1, zero))
    if by_host.predicted_s < synced.predicted_s:
        return replace(by_host, path=SyncPath.RDU, way="through the host, which is quicker here")
    return synced


def _by_rdu(alone: RankAlone, placement: Placement) -> SyncedRank:
    syncs = syncs_of(alone, placement, SyncPath.RDU, 1)
    step = sliced(alone, placement.replicas)
    spans = [_host(step)]
    for _ in range(step.micro_steps):
        spans += _run(step.model, spans[-1].stop_s)
    backward_s, slowest_s = spans[-1].stop_s, slowest_s_of(alone, placement.replicas)
    ends_s = [span.stop_s for span in spans[-len(step.model) :]]
    ready_s = {name: ends_s[: ready.reduce][-1] + slowest_s for name, ready in readiness(alone.program).items()}
    reduces = {name: syncs[name].reduce for name in sorted(syncs, key=lambda name: ready_s[name])}
    reduced = on_links(SectionKind.REDUCE, reduces, ready_s)
    update_s = max([backward_s + slowest_s, *(span.stop_s for span in reduced)])
    spans += reduced + _run(step.update, update_s, len(step.model))
    gathers = {name: sync.gather for name, sync in syncs.items()}
    gathered = on_links(SectionKind.GATHER, gathers, dict.fromkeys(gathers, spans[-1].stop_s))
    moved = sum((sync.reduce + sync.gather for sync in syncs.values()), Traffic())
    exposed_s = update_s - backward_s + sum(span.predicted_s for span in gathered)
    path, all_spans, ideal_s = SyncPath.RDU, (*spans, *gathered), step.predicted_s
    return SyncedRank(step, path, all_spans, moved, exposed_s, _ways(syncs), slowest_s, ideal_s)


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


def on_links(kind: SectionKind, groups: Mapping[str, Traffic], ready_s: Mapping[str, float]) -> list[Span]:
    """One transfer after another, each once it is ready."""
    spans: list[Span] = []
    free_s = 0.0
    for name, traffic in groups.items():
        if traffic.predicted_s:
            start_s = max(free_s, ready_s[name])
            free_s = start_s + traffic.predicted_s
            spans.append(Span(Track.LINKS, kind, name, start_s, free_s))
    return spans
