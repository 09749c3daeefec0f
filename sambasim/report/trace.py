"""A predicted step as a trace for Perfetto, with the format and tracks of `run --trace`: a process for each rank of the
first replica, or for the first ranks. A replica of one rank has its sections, another one its actions with the parts of
each; then update and sync."""

from collections.abc import Iterator

from sambasim import __version__
from sambasim.hardware.budget import load_calibration
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.schedule import Action
from sambasim.records.trace import TraceProcess, TraceSpan, trace_json
from sambasim.records.trace import Track as Shown
from sambasim.report.steps import NOTE
from sambasim.simulation.ranks import Cost
from sambasim.simulation.scaling import Span, SyncedRank, Track
from sambasim.simulation.step import PredictedStep

_MOST_SHOWN = 4
"""The most ranks in a trace, if a replica has fewer. All replicas do the same at the same time."""

_NS_PER_S = 1e9
_SHOWN_TRACKS = {Track.HOST: Shown.HOST, Track.SECTIONS: Shown.SECTIONS, Track.LINKS: Shown.COLLECTIVES}


def predicted_trace(step: PredictedStep) -> str:
    synced, world_size = step.synced, step.mesh.world_size
    shown = min(world_size, max(_MOST_SHOWN, step.program.ranks_of_replica))
    processes = []
    for at in step.placement.locations()[:shown]:
        if step.several_ranks:
            title = f"rank {at.replica} of {world_size} ({step.mesh.place(at.replica)}) as {at}, predicted"
            spans = list(_action_spans(step, step.mesh.coordinate(at.replica, PIPELINE)))
        else:
            title, spans = f"replica {at.replica} of {world_size}, {at}, predicted", list(_section_spans(synced))
        processes.append(TraceProcess(at.replica, title, spans))
    facts = {
        "kind": "predicted",
        "by": f"sambasim {__version__}",
        "pef": step.program.name,
        "pef_digest": None,
        "device": f"{step.budget.where}: predicted, never measured here",
        "calibrated_on": load_calibration().fit.rows,
        "sync": "none" if synced.path is None else f"{synced.path}: {synced.way}",
        "predicted_s": step.predicted_s,
        "replicas": step.replicas,
        "replicas_shown": -(-shown // step.program.ranks_of_replica),
        "mesh": str(step.mesh),
        "schedule": step.schedule.name if step.program.schedule is not None else "none",
        "ranks_shown": shown,
    }
    return trace_json(processes, {**facts, "backed_by": NOTE} if step.several_ranks else facts)


def _section_spans(synced: SyncedRank) -> Iterator[TraceSpan]:
    micro_step = -1
    for span in synced.spans:
        # Each micro-step begins with section 0.
        micro_step += span.section == 0
        args: dict[str, int | str] = {"kind": span.kind}
        if span.section is not None:
            section = synced.step.sections[span.section]
            args["section"] = span.section
            if synced.step.runs(section) > 1:
                args["micro_step"] = micro_step
            args |= {"read_bytes": section.load.read_bytes, "written_bytes": section.load.written_bytes}
            args["bound"] = section.price.bound
        yield _shown(span, args)


def _shown(span: Span, args: dict[str, int | str]) -> TraceSpan:
    title = span.name if span.track is Track.HOST else f"{span.kind} {span.name}"  # as in a measured trace
    return TraceSpan(_SHOWN_TRACKS[span.track], title, _nanoseconds(span.start_s), _nanoseconds(span.stop_s), args)


def _nanoseconds(time_s: float) -> int:
    return round(time_s * _NS_PER_S)


def _action_spans(step: PredictedStep, position: int) -> Iterator[TraceSpan]:
    for micro_step in range(step.micro_steps):
        began_s = micro_step * step.passes.predicted_s
        for action, start_s, stop_s in step.passes.timeline[position]:
            args: dict[str, int | str] = {"action": str(action), "stage": action.stage}
            args |= {"micro_batch": action.micro_batch, "micro_step": micro_step}
            start_ns, stop_ns = _nanoseconds(began_s + start_s), _nanoseconds(began_s + stop_s)
            yield TraceSpan(Shown.SECTIONS, title_of(action), start_ns, stop_ns, args)
            yield from _parts(step.passes.cost(action), began_s + start_s, stop_ns)
    for span in step.ranks[position].spans_after(step.passes_s):
        yield _shown(span, {"kind": span.kind})


def kind_of(action: Action) -> str:
    return action.kind.name.lower().replace("_", " ")


def title_of(action: Action) -> str:
    return f"{kind_of(action)} {action.micro_batch}, stage {action.stage}"


def _parts(cost: Cost, start_s: float, end_ns: int) -> Iterator[TraceSpan]:
    """The parts of an action, one after the other. In a step, messages are between its sections and operators."""
    parts: list[tuple[str, float, dict[str, int]]] = [("host", cost.host_s, {})]
    for axis, traffic in cost.messages.items():
        received = {f"{wire}_bytes": round(size_bytes) for wire, size_bytes in traffic.received_bytes.items()}
        parts.append((f"messages along {axis}", traffic.predicted_s, received))
    parts.append(("sections", cost.device_s, {}))
    for name, seconds, args in parts:
        start_ns, start_s = _nanoseconds(start_s), start_s + seconds
        if seconds:
            yield TraceSpan(Shown.SECTIONS, name, start_ns, min(_nanoseconds(start_s), end_ns), args)
