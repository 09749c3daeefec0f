"""The tables of `sambasim simulate`: predicted times, and nothing that was measured."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.price import Bound
from sambasim.report.scaling import ScalingRecord, scaling_records
from sambasim.report.tables import add_row, plain_table
from sambasim.simulation.backing import backing_of, is_recurrent, likely_s
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.step import PredictedStep, TimedSection
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_bytes, format_rate, format_seconds


class SectionRecord(BaseModel):
    """A section as `--json` prints it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    name: str
    operators: int
    predicted_s: float
    compute_s: float
    memory_s: float
    fill_s: float
    launch_s: float
    traffic_bytes: int
    product_flops: int
    bound: Bound


class SimulationRecord(BaseModel):
    """What `sambasim simulate --json` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    device: str
    tiles: int | None
    level: str
    batch_size: int
    predicted_s: float
    device_s: float
    host_s: float
    predicted_samples_per_s: float
    needed_bytes: int
    capacity_bytes: int
    slow_bytes: int
    micro_steps: int
    predicted_least_s: float | None
    predicted_most_s: float | None
    backed_by: str
    cluster: str
    scaling: tuple[ScalingRecord, ...]
    sections: tuple[SectionRecord, ...]


def simulation_json(facts: Prediction, paths: Sequence[SyncPath]) -> str:
    """One line."""
    span, most = likely_s(facts), _most_replicas(facts)
    return SimulationRecord(
        name=facts.program.name,
        device=facts.device.name,
        tiles=facts.tiles,
        level=facts.level,
        batch_size=facts.alone.batch_size,
        predicted_s=facts.alone.predicted_s,
        device_s=facts.alone.device_s,
        host_s=facts.alone.host_s,
        predicted_samples_per_s=facts.alone.samples_per_s,
        needed_bytes=facts.alone.need.size_bytes,
        capacity_bytes=facts.alone.budget.capacity_bytes,
        slow_bytes=facts.alone.tiers.slow_bytes,
        micro_steps=facts.alone.micro_steps,
        predicted_least_s=None if span is None else span[0],
        predicted_most_s=None if span is None else span[1],
        backed_by=backing_of(facts.device, most),
        cluster=facts.cluster.name,
        scaling=scaling_records(facts, paths),
        sections=tuple(map(_record, facts.alone.sections)),
    ).model_dump_json()


def simulation_report(facts: Prediction, slowest: int) -> list[RenderableType]:
    """The step, what binds it, and its `slowest` sections."""
    step = facts.alone
    parts: list[RenderableType] = [Text("\n".join(_head(facts)))]
    kinds = plain_table("by kind", ["kind"], ["sections", "predicted", "share"])
    for kind, seconds in step.device_s_by_kind.items():
        count = sum(step.runs(section) for section in step.sections if section.kind is kind)
        add_row(kinds, kind, str(count), format_seconds(seconds), f"{seconds / step.device_s:.0%}")
    bounds = plain_table("by what binds it", ["bound"], ["predicted", "share"])
    for bound, seconds in step.device_s_by_bound.items():
        if seconds:
            add_row(bounds, _words(bound, step), format_seconds(seconds), f"{seconds / step.device_s:.0%}")
    parts += [kinds, bounds]
    if slowest:
        parts.append(_slowest(step, slowest))
    return [*parts, Text("\n".join(_notes(facts)))]


def _head(facts: Prediction) -> list[str]:
    step = facts.alone
    what = "step   " if facts.program.training is not None else "forward"
    batch = f"batch {step.batch_size}" + (f" x {step.micro_steps} accumulated" if step.micro_steps > 1 else "")
    head = [
        f"{facts.program.name} on {step.budget.where}, {facts.level}: predicted, not measured",
        f"  {what} {format_seconds(step.predicted_s)}, {batch}:"
        f" {format_seconds(step.device_s)} of the device, {format_seconds(step.host_s)} of the host",
    ]
    if span := likely_s(facts):
        head.append(f"  range   {format_seconds(span[0])} to {format_seconds(span[1])}, by the worst calibration row")
    head += [
        f"  speed   {format_rate(step.samples_per_s)} samples/s by one replica",
        f"  memory  {format_bytes(step.need.size_bytes)} of {format_bytes(step.budget.capacity_bytes)}:"
        f" {format_bytes(step.need.kept_bytes)} kept, {format_bytes(step.need.residency.size_bytes)} between sections",
    ]
    if step.tiers.slow_bytes:
        head.append(f"          {format_bytes(step.tiers.slow_bytes)} in DDR, which HBM has no room for")
    return head


def _slowest(step: PredictedStep, count: int) -> RenderableType:
    table = plain_table(
        "slowest sections",
        ["section", "kind", "name"],
        ["operators", "predicted", "compute", "memory", "fill", "launch", "traffic", "bound by"],
    )
    numbered = sorted(enumerate(step.sections), key=lambda pair: -pair[1].price.predicted_s)[:count]
    for number, section in numbered:
        price = section.price
        times = map(format_seconds, (price.predicted_s, price.compute_s, price.memory_s, price.fill_s, price.launch_s))
        traffic = format_bytes(section.load.traffic_bytes)
        bound = _words(price.bound, step)
        add_row(table, str(number), section.kind, section.name, str(section.operators), *times, traffic, bound)
    return table


def _words(bound: Bound, step: PredictedStep) -> str:
    if bound is Bound.MEMORY:
        return step.budget.memory
    return "room on the chip" if bound is Bound.CAPACITY else bound.value


def _record(section: TimedSection) -> SectionRecord:
    price = section.price
    return SectionRecord(
        kind=section.kind,
        name=section.name,
        operators=section.operators,
        predicted_s=price.predicted_s,
        compute_s=price.compute_s,
        memory_s=price.memory_s,
        fill_s=price.fill_s,
        launch_s=price.launch_s,
        traffic_bytes=section.load.traffic_bytes,
        product_flops=section.load.product_flops,
        bound=price.bound,
    )


def _most_replicas(facts: Prediction) -> int:
    """That sync: 1 without training."""
    if facts.program.training is None:
        return 1
    return max(step.placement.replicas for steps in facts.scaled.values() for step in steps)


def _notes(facts: Prediction) -> list[str]:
    most = _most_replicas(facts)
    notes = [
        backing_of(facts.device, most),
        "numbers have two bytes on the device, in a loss and in optimizer states four, whatever the PEF stores",
    ]
    launch_s = facts.alone.device_s_by_bound[Bound.LAUNCH]
    if launch_s > facts.alone.device_s / 2:
        each = format_seconds(facts.alone.budget.launch_s)
        notes.append(f"a launch takes {each}; sections bound by it compute for less: a larger batch costs little more")
    if is_recurrent(facts):
        notes.append("recurrent layers are priced as products: that each step waits for the one before is not modelled")
    if most > 1:
        notes.append(
            f"replicas are joined as in {facts.cluster.name}: sambasim devices has its figures and their sources;"
            " nothing is congested, and none is late"
        )
        if facts.program.training is not None:
            notes.append("replicas that sync on RDUs update a slice each, so efficiency can exceed 100%")
    elif facts.program.data_parallel is not None:
        notes.append("this is one replica, without REDUCE and GATHER: --replicas 2,4,8 predicts them")
    return notes
