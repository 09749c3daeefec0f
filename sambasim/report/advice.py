"""What would make a predicted step quicker: the same words and numbers on the terminal, on the page and in JSON."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from sambasim.report.tables import labelled
from sambasim.simulation.advice import Advice, Change, Fitting, OnDevice, Speed
from sambasim.units import format_bytes, format_rate, format_seconds

PRICED_IN = "priced in bf16, whatever dtype the PEF has; losses and optimizer states in float32"
BACKED = "published steps back only those of SN30; the host is taken to be as fast beside every device"

NO_CHANGE = "no other outputs, batch, tiles, accumulation, level, sync or clipping gains more than 2%"


def gain_text(change: Change) -> str:
    return f"x{change.factor:.2f}"


def compared_text(change: Change) -> str:
    """`4.67 -> 8.04 samples/s by one replica on 4 of 8 tiles of SN30`."""
    before, after = (format_rate(one.samples_per_s) for one in (change.before, change.after))
    return f"{before} -> {after} samples/s by {change.compared}"


def how_text(change: Change) -> str:
    return f"{change.how} ({change.where})" if change.where else change.how


def step_text(change: Change) -> str:
    return f"{format_seconds(change.before.step_s)} -> {format_seconds(change.after.step_s)}"


def advice_parts(advice: Advice) -> list[RenderableType]:
    heading = "what would make it quicker, each predicted again by itself" if advice.changes else NO_CHANGE
    rows = []
    for one in advice.changes:
        rows.append((gain_text(one), f"{one.what}: a step of {step_text(one)}; {compared_text(one)}"))
        rows.append(("", how_text(one)))
    devices = f"one replica on a whole RDU: {'; '.join(map(_device_text, advice.devices))}"
    return [Text(f"\n{heading}", style="bold"), labelled(rows), Text(f"\n{devices}\n{BACKED}\n")]


def _device_text(one: OnDevice) -> str:
    if one.speed is None:
        return f"{one.device}: does not fit"
    return f"{one.device}: {format_seconds(one.speed.step_s)}, {format_rate(one.speed.samples_per_s)} samples/s"


def advice_fields(advice: Advice) -> Mapping[str, object]:
    return {
        "priced_in": PRICED_IN,
        "advice": [_change_fields(change) for change in advice.changes],
        "devices": [{"device": one.device, **_speed_fields(one.speed)} for one in advice.devices],
    }


def _change_fields(change: Change) -> Mapping[str, object]:
    return {
        "change": change.what,
        "how": change.how,
        "where": change.where,
        "compared": change.compared,
        "predicted_s_before": change.before.step_s,
        "predicted_samples_per_s_before": change.before.samples_per_s,
        **_speed_fields(change.after),
        "predicted_gain_samples_per_s": change.gain_samples_per_s,
    }


def _speed_fields(speed: Speed | None) -> Mapping[str, float | None]:
    return {
        "predicted_s": None if speed is None else speed.step_s,
        "predicted_samples_per_s": None if speed is None else speed.samples_per_s,
    }


def fitting_text(fits: Sequence[Fitting]) -> str:
    """What to type so that a program fits, and what is predicted then: a line for each."""
    return "\n".join(
        f"{one.how}: a step of {format_seconds(one.step.predicted_s)}, {format_rate(one.step.samples_per_s)} samples/s"
        f" (predicted), {format_bytes(one.step.need.size_bytes)} of {format_bytes(one.step.budget.capacity_bytes)}"
        for one in fits
    )
