"""A step of many replicas. By rdu, a gradient group is reduced as soon as its section ends, each replica updates its
slice, then GATHER; by host, all groups are reduced after the backward, and every replica updates everything. Transfers
do not slow sections down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from sambasim.hardware.placement import Placement
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.simulation.step import MODEL_KINDS, PredictedStep, TimedSection, slowed, updates
from sambasim.simulation.sync import WIRE_BYTES, SyncPath, Wire, group_sync


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
    """The step of each replica of `placement`. `path` is None if nothing is synced; `exposed_sync_s` is the part of
    `sync_s` in which sections wait; `way` says how gradients are sent; `received_bytes` is what a replica receives of
    them and of parameters."""

    step: PredictedStep
    placement: Placement
    path: SyncPath | None
    spans: tuple[Span, ...]
    sync_s: float
    exposed_sync_s: float
    way: str
    received_bytes: Mapping[Wire, float] = field(default_factory=dict)

    @cached_property
    def predicted_s(self) -> float:
        return self.step.predicted_s + self.exposed_sync_s

    @property
    def hidden_sync_s(self) -> float:
        return self.sync_s - self.exposed_sync_s

    @property
    def sync_share(self) -> float:
        """The fraction of the step in which sections wait for sync."""
        return self.exposed_sync_s / self.predicted_s

    @property
    def samples_per_s(self) -> float:
        return self.placement.replicas * self.step.micro_steps * self.step.batch_size / self.predicted_s

    def efficiency(self, alone: PredictedStep) -> float:
        return self.samples_per_s / self.placement.replicas / alone.samples_per_s


def scale(program: Program, alone: PredictedStep, placement: Placement, path: SyncPath) -> ScaledStep:
    """The step of `program` on all replicas of `placement`; `alone` is that of one. RDUs sync through the host where
    that is quicker."""
    scaled = _scaled(program, alone, placement, path)
    if scaled.path is SyncPath.RDU:
        by_host = _scaled(program, alone, placement, SyncPath.HOST)
        if by_host.predicted_s < scaled.predicted_s:
            return replace(by_host, path=SyncPath.RDU, way="through the host, which is quicker here")
    return scaled


def _scaled(program: Program, alone: PredictedStep, placement: Placement, path: SyncPath) -> ScaledStep:
    replicas = placement.replicas
    model = tuple(section for section in alone.sections if section.kind in MODEL_KINDS)
    update = alone.sections[len(model) :]
    if replicas == 1 or program.training is None:
        spans = _model(alone, model)
        spans += _run(update, spans[-1].stop_s, len(model))
        return ScaledStep(alone, placement, None, tuple(spans), 0.0, 0.0, "")
    rate = slowed(alone.budget, alone.tiers.rest)
    syncs = {group.name: group_sync(path, WIRE_BYTES * group.numel, placement, rate) for group in program.groups}
    if path is SyncPath.RDU:
        update = tuple(updates(program, alone.budget, alone.tiers, replicas))
    step = replace(alone, sections=(*model, *update))
    # On the host path: to the host and back.
    launch_s = alone.budget.launch_s * (2 if path is SyncPath.HOST else 1)
    spans = _model(step, model)
    backward_s = spans[-1].stop_s
    at_the_end = dict.fromkeys(syncs, backward_s)
    ready_s = _ready_s(program, model, spans) if path is SyncPath.RDU else at_the_end
    in_order = sorted(program.groups, key=lambda group: ready_s[group.name])
    reduced = _on_links(SectionKind.REDUCE, {g.name: syncs[g.name].reduce_s for g in in_order}, ready_s, launch_s)
    update_s = max(backward_s, *(span.stop_s for span in reduced)) if reduced else backward_s
    spans += reduced + _run(update, update_s, len(model))
    gathered: list[Span] = []
    if path is SyncPath.RDU:
        gather_s = {name: sync.gather_s for name, sync in syncs.items()}
        gathered = _on_links(SectionKind.GATHER, gather_s, dict.fromkeys(syncs, spans[-1].stop_s), launch_s)
    spans += gathered
    sync_s = sum(span.predicted_s for span in (*reduced, *gathered))
    exposed_s = update_s - backward_s + sum(span.predicted_s for span in gathered)
    ways = dict.fromkeys(sync.ways for sync in syncs.values())
    received_bytes = {wire: sum(sync.received_bytes.get(wire, 0.0) for sync in syncs.values()) for wire in Wire}
    return ScaledStep(step, placement, path, tuple(spans), sync_s, exposed_s, "; ".join(ways), received_bytes)


def _model(step: PredictedStep, model: Sequence[TimedSection]) -> list[Span]:
    spans = [Span(Track.HOST, "HOST", "inputs, outputs, starting sections", 0.0, step.host_s)]
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


def _on_links(
    kind: SectionKind, groups_s: Mapping[str, float], ready_s: Mapping[str, float], launch_s: float
) -> list[Span]:
    """The transfers of `groups_s` (seconds by group), one after another in this order, each once it is ready."""
    spans: list[Span] = []
    free_s = 0.0
    for name, transfer_s in groups_s.items():
        start_s = max(free_s, ready_s[name])
        free_s = start_s + launch_s + transfer_s
        spans.append(Span(Track.LINKS, kind, name, start_s, free_s))
    return spans
