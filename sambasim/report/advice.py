"""What takes the largest part of a predicted step, and what would make it quicker: the same words and numbers on the
terminal, on the page and in JSON."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.price import Bound
from sambasim.costs.work import device_bytes_of
from sambasim.ir.types import SymbolKind
from sambasim.report.tables import labelled
from sambasim.simulation.advice import Advice, Change, Fitting, Speed, fetched_outputs
from sambasim.simulation.prediction import Prediction
from sambasim.units import counted, format_bytes, format_rate, format_seconds

PRICED_IN = "priced in bf16, whatever dtype the PEF has; losses and optimizer states in float32"
BACKED = "published steps back only those of SN30; the host is taken to be as fast beside every device"
NOT_VALIDATED = (
    "pipeline and tensor parallelism are not validated: messages take the published bandwidths and latencies of links; "
    "no step of several RDUs was ever published"
)
NO_CHANGE = "no other outputs, batch, tiles, accumulation, level, sync or clipping gains more than 2%"


def headline(prediction: Prediction, advice: Advice) -> str:
    """`94% of the step is the host: …; return only the loss: 1.77 s -> 265.3 ms`: what takes the largest part, and the
    change to one replica that gains most, in samples/s where a step then has other samples, or other hardware."""
    alone, by_bound = prediction.alone, prediction.alone.device_s_by_bound
    parts = [
        (alone.host_s, f"the host: {_host(prediction)}"),
        (by_bound[Bound.COMPUTE], "sections bound by compute"),
        (by_bound[Bound.MEMORY], f"sections bound by {alone.budget.memory}"),
        (by_bound[Bound.CAPACITY], "sections whose weights exceed the chip, so that tensors are read again"),
        (
            by_bound[Bound.LAUNCH],
            f"sections bound by their launch, at least {format_seconds(alone.budget.launch_s)} each",
        ),
    ]
    seconds, words = max(parts, key=lambda part: part[0])
    binds = f"{seconds / alone.predicted_s:.0%} of the {step_or_forward(prediction)} is {words}"
    best = next((change for change in advice.changes if not change.several), None)
    if best is None:
        return f"{binds}; no change to one replica gains more than 2%"
    where = f" ({best.where})" if best.where else ""
    _, steps, rates, _ = change_texts(best)
    return f"{binds}; {best.what}{where}: {steps if best.before.samples == best.after.samples else rates}"


def step_or_forward(prediction: Prediction) -> str:
    return "step" if prediction.program.training is not None else "forward"


def _host(prediction: Prediction) -> str:
    step, program = prediction.alone, prediction.program
    each = "step" if step.micro_steps == 1 else "micro-step"
    starts_s = step.starts_s
    if starts_s > step.sent_s:
        return f"it starts {counted(round(starts_s / step.start_s), 'section')} each {each}"
    fetched = fetched_outputs(program)
    fetched_bytes = step.batch_size * sum(output.bytes_per_sample for output in fetched)
    symbols = (program.symbols[name] for name in prediction.graph.inputs)
    inputs_bytes = sum(device_bytes_of(symbol.type) for symbol in symbols if symbol.kind is SymbolKind.INPUT)
    inputs_bytes = inputs_bytes * step.batch_size // program.batch_size
    if fetched_bytes > inputs_bytes:
        names = " and ".join(output.name for output in fetched)
        return f"it fetches {format_bytes(fetched_bytes)} of {names} each {each}"
    return f"it sends {format_bytes(inputs_bytes)} of inputs each {each}"


def change_texts(change: Change) -> tuple[str, str, str, str]:
    """The gain (`x1.72`), the step before and after, the samples/s before and after and whose, and how to do it."""
    steps = " -> ".join(format_seconds(speed.step_s) for speed in (change.before, change.after))
    rates = " -> ".join(format_rate(speed.samples_per_s) for speed in (change.before, change.after))
    how = f"{change.how} ({change.where})" if change.where else change.how
    return f"x{change.factor:.2f}", steps, f"{rates} samples/s by {change.compared}", how


def advice_parts(advice: Advice) -> list[RenderableType]:
    heading = "what would make it quicker, each predicted again by itself" if advice.changes else NO_CHANGE
    rows = []
    for change in advice.changes:
        gain, steps, rates, how = change_texts(change)
        rows += [(gain, f"{change.what}: a step of {steps}; {rates}"), ("", how)]
    devices = "; ".join(f"{device.device}: {_speed_text(device.speed)}" for device in advice.devices)
    of_whole = f"one replica on a whole RDU: {devices}"
    return [Text(f"\n{heading}", style="bold"), labelled(rows), Text(f"\n{of_whole}\n{BACKED}\n")]


def _speed_text(speed: Speed | None) -> str:
    if speed is None:
        return "does not fit"
    return f"{format_seconds(speed.step_s)}, {format_rate(speed.samples_per_s)} samples/s"


def advice_fields(advice: Advice) -> Mapping[str, object]:
    def fields_of(speed: Speed | None) -> Mapping[str, float | None]:
        step_s, rate = (None, None) if speed is None else (speed.step_s, speed.samples_per_s)
        return {"predicted_s": step_s, "predicted_samples_per_s": rate}

    changes = [
        {
            "change": change.what,
            "how": change.how,
            "where": change.where,
            "compared": change.compared,
            "predicted_s_before": change.before.step_s,
            "predicted_samples_per_s_before": change.before.samples_per_s,
            **fields_of(change.after),
            "predicted_gain_samples_per_s": change.gain_samples_per_s,
        }
        for change in advice.changes
    ]
    devices = [{"device": device.device, **fields_of(device.speed)} for device in advice.devices]
    return {"priced_in": PRICED_IN, "advice": changes, "devices": devices}


def fitting_text(fits: Sequence[Fitting]) -> str:
    """What to type so that a program fits, and what is predicted then: a line for each."""
    return "\n".join(
        f"{fit.how}: a step of {format_seconds(fit.step.predicted_s)}, {format_rate(fit.step.samples_per_s)} samples/s"
        f" (predicted), {format_bytes(fit.step.need.size_bytes)} of {format_bytes(fit.step.budget.capacity_bytes)}"
        for fit in fits
    )
