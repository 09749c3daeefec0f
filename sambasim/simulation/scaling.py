"""A step of many replicas. By rdu, a gradient group is reduced as soon as its section ends, each replica updates its
slice, then GATHER; by host, the same after the backward, or with ZeRO 0 every replica updates everything. Transfers do
not slow sections down. Replicas are not equally fast: each step waits for the slowest one.

By host, ZeRO 2 and 3 are nodes of passes (`simulation/zero.py`), for which sections wait."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from statistics import NormalDist

from sambasim.hardware.placement import Placement
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.simulation.step import MODEL_KINDS, PredictedStep, TimedSection, slowed, updates
from sambasim.simulation.sync import (
    GATHERS_IN_PASSES,
    WIRE_BYTES,
    GroupSync,
    SyncPath,
    Traffic,
    Wire,
    cut_as,
    group_sync,
    moves_in_passes,
    zero_of,
)


class Track(StrEnum):
    HOST = "host"
    SECTIONS = "sections"
    LINKS = "links"


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a predicted step, in seconds since its start; all replicas have the same. `kind` is a section kind
    or `HOST`; `section` is the section's number in the step, if it is one."""

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
class ScaledStep:
    """The step of each replica of `placement`. `path` is None if nothing is synced; `sync_s` is the time of transfers,
    `exposed_sync_s` the time in which sections wait for them and, in `slowest_s` of it, for the slowest replica; `way`
    says how gradients are sent; `received_bytes` is what a replica receives of them and of parameters; `ideal_s` is the
    step of replicas that share the update and never wait."""

    step: PredictedStep
    placement: Placement
    path: SyncPath | None
    spans: tuple[Span, ...]
    sync_s: float
    exposed_sync_s: float
    way: str
    received_bytes: Mapping[Wire, float] = field(default_factory=dict)
    slowest_s: float = 0.0
    ideal_s: float = 0.0

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

    @property
    def samples_per_s(self) -> float:
        return self.placement.replicas * self.step.micro_steps * self.step.batch_size / self.predicted_s

    def times_s(self, kind: SectionKind) -> list[float]:
        """Of one run of each section of `kind`; of REDUCE and GATHER, of each transfer."""
        if kind in (SectionKind.REDUCE, SectionKind.GATHER):
            return [one.predicted_s for one in self.spans if one.track is Track.LINKS and one.kind == kind]
        return [one.price.predicted_s for one in self.step.sections if one.kind is kind]

    @property
    def efficiency(self) -> float:
        """Relative to replicas that share the update and never wait."""
        return self.ideal_s / self.predicted_s


def scale(
    program: Program, alone: PredictedStep, placement: Placement, path: SyncPath, *, in_passes: bool = True
) -> ScaledStep:
    """The step of `program` on all replicas of `placement`; `alone` is that of one. RDUs sync through the host where
    that is quicker, with whole gradients and parameters. Without `in_passes`, groups are reduced after the passes, and
    the caller counts what is gathered in them."""
    if path is SyncPath.HOST:
        return _by_host(program, alone, placement, zero_of(program), in_passes=in_passes)
    scaled = _by_rdu(program, alone, placement)
    by_host = _by_host(program, alone, placement, min(1, zero_of(program)))
    if scaled.path is not None and by_host.predicted_s < scaled.predicted_s:
        return replace(by_host, path=SyncPath.RDU, way="through the host, which is quicker here")
    return scaled


def syncs_of(
    program: Program, step: PredictedStep, placement: Placement, path: SyncPath, zero: int
) -> Mapping[str, GroupSync]:
    """By group, how it is synced. Each transfer is launched; on the host path twice: to the host and back."""
    rate = slowed(step.budget, step.tiers.rest)
    launch = Traffic(step.budget.launch_s * (2 if path is SyncPath.HOST else 1))

    def launched(traffic: Traffic) -> Traffic:
        return traffic + launch if traffic.predicted_s else traffic

    found = {}
    for group in program.groups:
        one = group_sync(path, WIRE_BYTES * group.numel, placement, rate, sliced=zero > 0)
        found[group.name] = replace(one, reduce=launched(one.reduce), gather=launched(one.gather))
    return found


def _by_rdu(program: Program, alone: PredictedStep, placement: Placement) -> ScaledStep:
    if placement.replicas == 1 or program.training is None:
        return _without_sync(alone, placement)
    syncs = syncs_of(program, alone, placement, SyncPath.RDU, 1)
    step = _sliced(program, alone, placement.replicas)
    model, update = _parts(step)
    spans = _model(step, model)
    backward_s = spans[-1].stop_s
    ready_s = _ready_s(program, model, spans)
    slowest_s = slowest_s_of(alone, placement.replicas)
    in_order = sorted(syncs, key=lambda name: ready_s[name])
    complete_s = {name: ready_s[name] + slowest_s for name in in_order}
    reduced = _on_links(SectionKind.REDUCE, {name: syncs[name].reduce for name in in_order}, complete_s)
    update_s = max([backward_s + slowest_s, *(span.stop_s for span in reduced)])
    spans += reduced + _run(update, update_s, len(model))
    gathered = _on_links(SectionKind.GATHER, _gathers(syncs), dict.fromkeys(syncs, spans[-1].stop_s))
    exposed_s = update_s - backward_s + sum(span.predicted_s for span in gathered)
    moved = [traffic for sync in syncs.values() for traffic in (sync.reduce, sync.gather)]
    return _synced(
        step, placement, SyncPath.RDU, [*spans, *gathered], moved, syncs, slowest_s, step.predicted_s, exposed_s
    )


def _by_host(
    program: Program, alone: PredictedStep, placement: Placement, zero: int, *, in_passes: bool = True
) -> ScaledStep:
    if placement.replicas == 1 or program.training is None:
        return _without_sync(alone, placement)
    syncs = syncs_of(program, alone, placement, SyncPath.HOST, zero)
    step = _sliced(program, alone, placement.replicas) if zero else alone
    model, update = _parts(step)
    cut = [(one.kind, one.name, one.nodes) for one in model]
    moves = moves_in_passes(cut_as(program, cut)) if zero > 1 and in_passes else []
    spans = [_host(step)]
    moved: list[Traffic] = []
    slowest_s, waited_s = slowest_s_of(alone, placement.replicas), 0.0

    def transfer(kind: SectionKind, names: Iterable[str]) -> None:
        of_kind = {name: syncs[name].reduce if kind is SectionKind.REDUCE else syncs[name].gather for name in names}
        spans.extend(_on_links(kind, of_kind, dict.fromkeys(of_kind, max(spans[-1].stop_s, waited_s))))
        moved.extend(of_kind.values())

    for micro_step in range(step.micro_steps):
        for number, section in enumerate(model):
            if moves:
                transfer(SectionKind.GATHER, moves[number].gathered)
            spans += _run([section], spans[-1].stop_s, number)
            if moves and micro_step == step.micro_steps - 1:
                transfer(SectionKind.REDUCE, moves[number].reduced)
    reduced = {name for one in moves for name in one.reduced}
    waited_s = spans[-1].stop_s + slowest_s
    transfer(SectionKind.REDUCE, [name for name in syncs if name not in reduced])
    spans += _run(update, max(spans[-1].stop_s, waited_s), len(model))
    if zero < GATHERS_IN_PASSES:
        transfer(SectionKind.GATHER, _gathers(syncs))
    ideal_s = _sliced(program, alone, placement.replicas).predicted_s
    return _synced(step, placement, SyncPath.HOST, spans, moved, syncs, slowest_s, ideal_s)


def _synced(
    step: PredictedStep,
    placement: Placement,
    path: SyncPath,
    spans: Sequence[Span],
    moved: Sequence[Traffic],
    syncs: Mapping[str, GroupSync],
    slowest_s: float,
    ideal_s: float,
    exposed_s: float | None = None,
) -> ScaledStep:
    """`exposed_s`: how long sections wait for the slowest replica and for what is `moved`; without it, all of the
    time."""
    total = sum(moved, Traffic())
    if exposed_s is None:
        exposed_s = total.predicted_s + slowest_s
    return ScaledStep(
        step,
        placement,
        path,
        tuple(spans),
        total.predicted_s,
        exposed_s,
        way="; ".join(dict.fromkeys(sync.ways for sync in syncs.values())),
        received_bytes=total.received_bytes,
        slowest_s=slowest_s,
        ideal_s=ideal_s,
    )


def slowest_s_of(alone: PredictedStep, replicas: int) -> float:
    """How much longer the slowest of `replicas` takes than their mean. Of several micro-steps, one counts: how their
    times add up is not published."""
    model_s = sum(one.price.predicted_s for one in alone.sections if one.kind in MODEL_KINDS)
    return alone.budget.spread * model_s * spread_of(replicas)


@cache
def spread_of(replicas: int) -> float:
    """By how many standard deviations the slowest of `replicas` is expected to be above their mean, if the times of a
    pass have a normal distribution (Blom 1958)."""
    return NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25)) if replicas > 1 else 0.0


def _without_sync(alone: PredictedStep, placement: Placement) -> ScaledStep:
    model, update = _parts(alone)
    spans = _model(alone, model)
    spans += _run(update, spans[-1].stop_s, len(model))
    return ScaledStep(alone, placement, None, tuple(spans), 0.0, 0.0, "", ideal_s=alone.predicted_s)


def _sliced(program: Program, alone: PredictedStep, replicas: int) -> PredictedStep:
    """The step of a replica that updates its slice."""
    model, _ = _parts(alone)
    return replace(alone, sections=(*model, *updates(program, alone.budget, alone.tiers, replicas)))


def _parts(step: PredictedStep) -> tuple[Sequence[TimedSection], Sequence[TimedSection]]:
    """The sections of a pass, and those of the update."""
    model = [section for section in step.sections if section.kind in MODEL_KINDS]
    return model, step.sections[len(model) :]


def _gathers(syncs: Mapping[str, GroupSync]) -> Mapping[str, Traffic]:
    return {name: sync.gather for name, sync in syncs.items() if sync.gather.predicted_s}


def _host(step: PredictedStep) -> Span:
    return Span(Track.HOST, "HOST", "inputs, outputs, starting sections", 0.0, step.host_s)


def _model(step: PredictedStep, model: Sequence[TimedSection]) -> list[Span]:
    spans = [_host(step)]
    for _ in range(step.micro_steps):
        spans += _run(model, spans[-1].stop_s)
    return spans


def _run(sections: Sequence[TimedSection], start_s: float, first: int = 0) -> list[Span]:
    spans = []
    for number, section in enumerate(sections, first):
        stop_s = start_s + section.price.predicted_s
        spans.append(Span(Track.SECTIONS, section.kind, section.name, start_s, stop_s, number))
        start_s = stop_s
    return spans


def _ready_s(program: Program, model: Sequence[TimedSection], spans: Sequence[Span]) -> dict[str, float]:
    """By group: when its last gradient is complete. The sections may differ from those of the PEF."""
    training = program.training
    made_at = {name: place for place, node in enumerate(training.nodes) for name in node.results} if training else {}
    value_of = {output.symbol: output.value for output in training.outputs} if training else {}
    last_micro_step = spans[-len(model) :]
    ends_s = [(section.nodes[1], span.stop_s) for section, span in zip(model, last_micro_step, strict=True)]
    ready_s = {}
    for group in program.groups:
        last = max(made_at.get(value_of.get(member.gradient, ""), 0) for member in group.members)
        ready_s[group.name] = next((end_s for stop, end_s in ends_s if last < stop), ends_s[-1][1])
    return ready_s


def _on_links(kind: SectionKind, groups: Mapping[str, Traffic], ready_s: Mapping[str, float]) -> list[Span]:
    """The transfers of `groups`, one after another in this order, each once it is ready."""
    spans: list[Span] = []
    free_s = 0.0
    for name, traffic in groups.items():
        start_s = max(free_s, ready_s[name])
        free_s = start_s + traffic.predicted_s
        spans.append(Span(Track.LINKS, kind, name, start_s, free_s))
    return spans
