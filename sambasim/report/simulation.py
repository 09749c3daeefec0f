"""The tables of `sambasim simulate`: predicted times, and nothing that was measured."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.price import Bound
from sambasim.hardware.calibration import load_calibration
from sambasim.hardware.cluster import ClusterSpec
from sambasim.hardware.spec import DeviceSpec
from sambasim.ir.program import Program
from sambasim.report.scaling import ScalingRecord
from sambasim.report.tables import add_row, plain_table
from sambasim.simulation.step import PredictedStep, TimedSection
from sambasim.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True, slots=True)
class Simulated:
    """A prediction and what it is of. `tiles` is None for the whole device, `level` o0, o1 or o3; `scaling` has a row
    for each number of replicas and way to sync."""

    program: Program
    device: DeviceSpec
    tiles: int | None
    level: str
    step: PredictedStep
    cluster: ClusterSpec
    scaling: tuple[ScalingRecord, ...] = ()


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


def simulation_json(facts: Simulated) -> str:
    """One line."""
    span = _range(facts)
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
        slow_bytes=facts.step.tiers.slow_bytes,
        micro_steps=facts.step.micro_steps,
        predicted_least_s=None if span is None else span[0],
        predicted_most_s=None if span is None else span[1],
        backed_by=_backing(facts.device),
        cluster=facts.cluster.name,
        scaling=facts.scaling,
        sections=tuple(map(_record, facts.step.sections)),
    ).model_dump_json()


def simulation_report(facts: Simulated, slowest: int) -> list[RenderableType]:
    """The step, what binds it, and its `slowest` sections."""
    step = facts.step
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


def _head(facts: Simulated) -> list[str]:
    step = facts.step
    what = "step   " if facts.program.training is not None else "forward"
    batch = f"batch {step.batch_size}" + (f" x {step.micro_steps} accumulated" if step.micro_steps > 1 else "")
    head = [
        f"{facts.program.name} on {step.budget.where}, {facts.level}: predicted, not measured",
        f"  {what} {format_seconds(step.predicted_s)}, {batch}:"
        f" {format_seconds(step.device_s)} of the device, {format_seconds(step.host_s)} of the host",
    ]
    if span := _range(facts):
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


def _range(facts: Simulated) -> tuple[float, float] | None:
    """Between which times the step lies if it is as far off as the worst calibration row; None for another device."""
    fit = load_calibration().fit
    if facts.device.name != fit.device:
        return None
    step = facts.step
    least = step.device_s * (1 - fit.worst_error) + step.host_s * (1 - fit.worst_host_error)
    most = step.device_s * (1 + fit.worst_error) + step.host_s * (1 + fit.worst_host_error)
    return least, most


def _an(name: str) -> str:
    """SN10 is spelled out when it is read aloud."""
    return f"an {name}" if name.startswith("SN") else f"a {name}"


def _backing(device: DeviceSpec) -> str:
    fit = load_calibration().fit
    if device.name != fit.device:
        return (
            f"no published step of {_an(device.name)} backs this: its figures are published or marked as estimates, and"
            f" efficiencies are those of {_an(fit.device)}; for HBM, that of the SN40L paper"
        )
    return (
        f"calibrated on {fit.rows}, which it meets within {fit.mean_error:.0%} in the mean and {fit.worst_error:.0%}"
        " at worst: see sambasim validate. Other models may be further off"
    )


def _notes(facts: Simulated) -> list[str]:
    notes = [_backing(facts.device)]
    notes.append(
        "numbers have two bytes on the device, in a loss and in optimizer states four, whatever the PEF stores"
    )
    if facts.program.data_parallel is not None and len(facts.scaling) <= 1:
        notes.append("this is one replica, without REDUCE and GATHER: --replicas 2,4,8 predicts them")
    if any(row.replicas > 1 for row in facts.scaling):
        notes.append(
            f"replicas are joined as in {facts.cluster.name}; no sync of RDUs was ever published: sambasim devices has"
            " the figures of its links, and what of them is an estimate"
        )
    return notes
