"""The predicted step of a mesh as a trace for Perfetto: a process for each rank of the first replica, or for the first
ranks, with its actions, their messages, the update and the sync."""

from collections.abc import Iterator

from sambasim.ir.mesh import PIPELINE
from sambasim.ir.schedule import Action
from sambasim.records.trace import TraceProcess, TraceSpan, Track, trace_json
from sambasim.report.mesh_records import NOTE
from sambasim.report.simulation import MOST_SHOWN, SHOWN_TRACKS, nanoseconds, predicted_facts, title_of_span
from sambasim.simulation.mesh import MeshStep
from sambasim.simulation.ranks import Cost


def mesh_trace(step: MeshStep) -> str:
    shown = min(step.mesh.world_size, max(MOST_SHOWN, step.program.ranks_of_replica))
    processes = [
        TraceProcess(
            at.replica,
            f"rank {at.replica} of {step.mesh.world_size} ({step.mesh.place(at.replica)}) as {at}, predicted",
            list(_spans(step, step.mesh.coordinate(at.replica, PIPELINE))),
        )
        for at in step.placement.locations()[:shown]
    ]
    facts = predicted_facts(step.program.name, step.ranks[0].scaled, step.predicted_s)
    of_mesh = {
        "mesh": str(step.mesh),
        "schedule": step.schedule.name if step.program.schedule is not None else "none",
        "ranks_shown": shown,
        "backed_by": NOTE,
    }
    return trace_json(processes, {**facts, **of_mesh})


def _spans(step: MeshStep, position: int) -> Iterator[TraceSpan]:
    for micro_step in range(step.micro_steps):
        began_s = micro_step * step.pass_s
        for action, start_s, stop_s in step.timeline[position]:
            args: dict[str, int | str] = {"action": str(action), "stage": action.stage}
            args |= {"micro_batch": action.micro_batch, "micro_step": micro_step}
            start_ns, stop_ns = nanoseconds(began_s + start_s), nanoseconds(began_s + stop_s)
            yield TraceSpan(Track.SECTIONS, title_of(action), start_ns, stop_ns, args)
            yield from _parts(step.cost(action), began_s + start_s, stop_ns)
    for span in step.ranks[position].spans_after(step.passes_s):
        start_ns, stop_ns = nanoseconds(span.start_s), nanoseconds(span.stop_s)
        yield TraceSpan(SHOWN_TRACKS[span.track], title_of_span(span), start_ns, stop_ns, {"kind": span.kind})


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
        start_ns, start_s = nanoseconds(start_s), start_s + seconds
        if seconds:
            yield TraceSpan(Track.SECTIONS, name, start_ns, min(nanoseconds(start_s), end_ns), args)
