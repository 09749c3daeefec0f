"""The tables of `sambasim simulate`: predicted times, and nothing that was measured."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.price import Bound
from sambasim.hardware.spec import DeviceSpec
from sambasim.ir.program import Program
from sambasim.report.tables import add_row, plain_table
from sambasim.simulation.step import PredictedStep, TimedSection
from sambasim.units import format_bytes, format_count, format_seconds

_CALIBRATED_ON = "SN30"


@dataclass(frozen=True, slots=True)
class Simulated:
    """A prediction and what it is of. `tiles` is None for the whole device, `level` o0, o1 or o3."""

    program: Program
    device: DeviceSpec
    tiles: int | None
    level: str
    step: PredictedStep


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
    backed_by: str
    sections: tuple[SectionRecord, ...]


def simulation_json(facts: Simulated) -> str:
    """One line."""
    return SimulationRecord(
        name=facts.program.name,
        device=facts.device.name,
        tiles=facts.tiles,
        level=facts.level,
        batch_size=facts.step.batch_size,
        predicted_s=facts.step.predicted_s,
        device_s=facts.step.device_s,
        host_s=facts.step.host_s,
        predicted_samples_per_s=facts.step.samples_per_s,
        needed_bytes=facts.step.need.size_bytes,
        capacity_bytes=facts.step.budget.capacity_bytes,
        backed_by=_backing(facts),
        sections=tuple(map(_record, facts.step.sections)),
    ).model_dump_json()


def simulation_report(facts: Simulated, slowest: int) -> list[RenderableType]:
    """The step, what binds it, and its `slowest` sections."""
    step = facts.step
    where = facts.device.name if facts.tiles is None else f"{facts.tiles} tiles of {facts.device.name}"
    what = "step" if facts.program.training is not None else "forward"
    head = [
        f"{facts.program.name} on {where}, {facts.level}: predicted, not measured",
        f"  {what}    {format_seconds(step.predicted_s)}, batch {step.batch_size}:"
        f" {format_seconds(step.device_s)} of the device, {format_seconds(step.host_s)} of the host",
        f"  speed   {format_count(step.samples_per_s)} samples/s by one replica",
        f"  memory  {format_bytes(step.need.size_bytes)} of {format_bytes(step.budget.capacity_bytes)}:"
        f" {format_bytes(step.need.kept_bytes)} kept, {format_bytes(step.need.residency.size_bytes)} between sections",
    ]
    kinds = plain_table("by kind", ["kind"], ["sections", "predicted", "share"])
    for kind, seconds in step.device_s_by_kind.items():
        count = sum(section.kind is kind for section in step.sections)
        add_row(kinds, kind, str(count), format_seconds(seconds), f"{seconds / step.device_s:.0%}")
    bounds = plain_table("by what binds it", ["bound"], ["predicted", "share"])
    for bound, seconds in step.device_s_by_bound.items():
        if seconds:
            add_row(bounds, _words(bound, step), format_seconds(seconds), f"{seconds / step.device_s:.0%}")
    parts: list[RenderableType] = [Text("\n".join(head)), kinds, bounds]
    if slowest:
        parts.append(_slowest(step, slowest))
    return [*parts, Text(_backing(facts))]


def _slowest(step: PredictedStep, count: int) -> RenderableType:
    table = plain_table(
        "slowest sections",
        ["section", "kind", "name"],
        ["operators", "predicted", "compute", "memory", "traffic", "bound by"],
    )
    numbered = sorted(enumerate(step.sections), key=lambda pair: -pair[1].price.predicted_s)[:count]
    for number, section in numbered:
        price = section.price
        times = map(format_seconds, (price.predicted_s, price.compute_s, price.memory_s))
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


def _backing(facts: Simulated) -> str:
    if facts.device.name != _CALIBRATED_ON:
        return (
            f"no published measurement of an {facts.device.name} backs this: efficiencies are those of an "
            f"{_CALIBRATED_ON}"
        )
    return f"efficiencies are calibrated on published {_CALIBRATED_ON} steps; sambasim validate tells how far it is off"
