"""The head of a page about a PEF: what it is of, the key figures, and where the time goes."""

from sambasim.report.page.facts import bound_words, shown
from sambasim.report.page.html import Html, element, joined
from sambasim.report.page.palette import BOUNDS, KINDS
from sambasim.report.page.part import Key, Part, keys, shares
from sambasim.simulation.backing import backing_of
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_bytes, format_seconds, plain_rate


def facts_line(prediction: Prediction, digest: str | None) -> list[tuple[str, str]]:
    """Name and value of what the page is of: a PEF with this digest, or a model alone."""
    device, tiles = prediction.device, prediction.tiles
    of_device = f"{device.tiles} tiles" if device.tiles else "whole"
    return [
        ("device", f"{device.name}, {of_device}" if tiles is None else f"{device.name}, {tiles} of {of_device}"),
        ("level", prediction.level),
        ("batch", f"{prediction.alone.batch_size} a replica"),
        ("cluster", prediction.cluster.name),
        ("step", "training" if prediction.program.training else "forward only"),
        *([] if digest is None else [("PEF", digest[:12])]),
    ]


def caveat(prediction: Prediction) -> Html:
    """That nothing here was measured, and what stands behind it."""
    several = 2 if prediction.program.training else 1
    return element(
        "p",
        element("b", "Predicted, not measured."),
        f" A model of the device gives these numbers: {backing_of(prediction.device, several)}.",
        class_="caveat",
    )


def summary(prediction: Prediction) -> Part:
    """Key figures, and the device's seconds by what binds them and by kind of section."""
    alone = prediction.alone
    seconds = alone.device_s
    bounds = [
        (bound_words(prediction, bound), amount, format_seconds(amount), BOUNDS[bound])
        for bound, amount in alone.device_s_by_bound.items()
    ]
    kinds = [
        (kind.value, amount, format_seconds(amount), KINDS[kind]) for kind, amount in alone.device_s_by_kind.items()
    ]
    return Part(
        id="summary",
        title="The step at a glance",
        lead="One replica alone, unless a number says how many. The two bars share out the device's part of its step.",
        measured=False,
        body=joined(
            [
                keys(_keys(prediction)),
                element(
                    "div",
                    shares(f"What binds the device's {format_seconds(seconds)}", bounds),
                    shares("The same time by kind of section", kinds),
                    class_="pair",
                ),
            ]
        ),
    )


def _keys(prediction: Prediction) -> list[Key]:
    alone, need = prediction.alone, prediction.alone.need
    busy = sum(section.price.compute_s for section in alone.sections) / alone.device_s if alone.device_s else 0.0
    slowest = max(alone.sections, key=lambda section: section.price.predicted_s)
    where = alone.sections.index(slowest)
    found = [
        Key(
            "step",
            format_seconds(alone.predicted_s),
            f"{format_seconds(alone.device_s)} device, {format_seconds(alone.host_s)} host",
        ),
        Key("throughput", plain_rate(alone.samples_per_s), "samples/s, host time included"),
        Key("compute in use", f"{busy:.1%}", "of the device's time, by the slowest stage"),
        Key(
            "slowest section",
            format_seconds(slowest.price.predicted_s),
            f"no. {where}, {slowest.kind}, bound by {bound_words(prediction, slowest.price.bound)}",
        ),
        Key(
            "memory",
            format_bytes(need.size_bytes),
            f"of {format_bytes(alone.budget.capacity_bytes)} {memory_words(prediction)}",
        ),
    ]
    if prediction.program.training is not None:
        rdu, host = (prediction.scaled[path][shown(prediction)] for path in (SyncPath.RDU, SyncPath.HOST))
        if rdu.placement.replicas > 1:
            found.append(
                Key(
                    f"on {rdu.placement.replicas} replicas",
                    f"{rdu.efficiency(alone):.0%}",
                    f"efficiency if RDUs sync; {host.efficiency(alone):.0%} if hosts do",
                )
            )
    return found


def memory_words(prediction: Prediction) -> str:
    """The memory beside the chip, by name."""
    return "HBM and DDR" if prediction.alone.budget.behind else prediction.alone.budget.memory
