"""A predicted step as a trace, in the format in which `run --trace` writes what it measures.

The tracks are those of a measured one, but for copies: what the links between host and device take is part of REDUCE.
"""

from collections.abc import Iterator, Mapping

from sambasim import __version__
from sambasim.hardware.budget import load_calibration
from sambasim.records.trace import TraceProcess, TraceSpan, trace_json
from sambasim.records.trace import Track as Shown
from sambasim.simulation.scaling import ScaledStep
from sambasim.simulation.timeline import Span, Track

MOST_REPLICAS = 4
"""That are shown. All do the same at the same time."""

_NS_PER_S = 1e9
_SHOWN = {Track.HOST: Shown.HOST, Track.SECTIONS: Shown.SECTIONS, Track.LINKS: Shown.COLLECTIVES}


def predicted_trace(scaled: ScaledStep, name: str, digest: str | None = None) -> str:
    """One step of the first replicas, from the host's start on.

    name: of the model
    digest: of its PEF, if there is one
    """
    placement, budget = scaled.placement, scaled.step.budget
    shown = min(placement.replicas, MOST_REPLICAS)
    spans = list(_spans(scaled))
    processes = [
        TraceProcess(seat.replica, f"replica {seat.replica} of {placement.replicas}, {seat}, predicted", spans)
        for seat in placement.locations()[:shown]
    ]
    fit = load_calibration().fit
    facts: Mapping[str, object] = {
        "kind": "predicted",
        "by": f"sambasim {__version__}",
        "pef": name,
        "pef_digest": digest,
        "device": f"{budget.where}: predicted, never measured here",
        "calibrated_on": fit.rows,
        "replicas": placement.replicas,
        "replicas_shown": shown,
        "sync": "none" if scaled.path is None else f"{scaled.path}: {scaled.way}",
        "predicted_s": scaled.predicted_s,
    }
    return trace_json(processes, facts)


def _spans(scaled: ScaledStep) -> Iterator[TraceSpan]:
    micro_step = -1
    for span in scaled.spans:
        # Sections run anew in each micro-step, from the first one on.
        micro_step += span.section == 0
        args = {"kind": span.kind, **_args(scaled, span, micro_step)}
        # A kind and a name, as those of a measured section.
        title = span.name if span.track is Track.HOST else f"{span.kind} {span.name}"
        yield TraceSpan(_SHOWN[span.track], title, _ns(span.start_s), _ns(span.stop_s), args)


def _args(scaled: ScaledStep, span: Span, micro_step: int) -> Mapping[str, int | str]:
    if span.section is None:
        return {}
    section = scaled.step.sections[span.section]
    of_model = {"micro_step": micro_step} if scaled.step.runs(section) > 1 else {}
    traffic = {"read_bytes": section.load.read_bytes, "written_bytes": section.load.written_bytes}
    return {"section": span.section, **of_model, **traffic, "bound": section.price.bound}


def _ns(time_s: float) -> int:
    return round(time_s * _NS_PER_S)
