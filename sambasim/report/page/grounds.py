"""The figures that a prediction rests on, each with its source."""

from collections.abc import Iterator

from sambasim.hardware.budget import load_calibration
from sambasim.hardware.spec import Spec
from sambasim.report.page.html import element, joined
from sambasim.report.page.part import Part, table
from sambasim.simulation.backing import backing_of
from sambasim.simulation.prediction import Prediction
from sambasim.units import format_bytes, format_count, format_seconds


def grounds(prediction: Prediction) -> Part:
    """Device, cluster and calibration."""
    numbers = [
        (name.replace("_", " "), _number(name, parameter.value), parameter.meaning, parameter.source)
        for name, parameter in load_calibration().parameters().items()
    ]
    body = [
        element("h3", f"Device: {prediction.device.name}"),
        table(("figure", "value", "source"), _figures(prediction.device), words=3, class_="sources"),
        element("h3", f"Cluster: {prediction.cluster.name}"),
        table(("figure", "value", "source"), _figures(prediction.cluster), words=3, class_="sources"),
        element("h3", "Calibration"),
        table(("number", "value", "meaning", "source"), numbers, words=4, class_="sources"),
        element("p", backing_of(prediction.device)),
    ]
    return Part(
        id="grounds",
        title="What the prediction rests on",
        lead="Published figures beside their sources, and the few numbers that turn them into times.",
        measured=False,
        body=element("details", element("summary", "Show all figures and sources"), joined(body)),
    )


def _figures(spec: Spec, within: str = "") -> Iterator[tuple[str, str, str]]:
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        words = within + name.replace("_", " ")
        if isinstance(value, Spec):
            yield words, value.name, spec.sources.get(name, "")
            yield from _figures(value, f"{words}: ")
        elif isinstance(value, int | float):
            yield words, _number(name, value), spec.sources.get(name, "")


def _number(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("flops_per_s"):
        return f"{format_count(value)}FLOP/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s") or name.startswith("host_s"):
        return format_seconds(value)
    return f"{value:g}"
