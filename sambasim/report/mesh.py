"""The output of `sambasim simulate` for a replica of several ranks: its stages, what they wait for, and the speed."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.schedule import ActionKind
from sambasim.report.output import add_row, json_line, plain_table
from sambasim.simulation.mesh import MeshStep
from sambasim.units import format_bytes, format_rate, format_seconds

_NOTE = "messages take the published bandwidths and latencies of links; no step of several RDUs was ever published"


def mesh_report(steps: Sequence[MeshStep]) -> list[RenderableType]:
    """For the fewest replicas the stages; for each number of replicas the step."""
    first = steps[0]
    lines = [
        f"{first.program.name} on {first.mesh}, each rank on {first.budget.where}: predicted, not measured",
        f"  step    {format_seconds(first.predicted_s)}",
        *_of_schedule(first),
        *(f"  along {axis}: rank 0 waits {format_seconds(seconds)} of it" for axis, seconds in first.waited_s.items()),
    ]
    kinds = [kind for kind in ActionKind if any(_seconds(first, rank, kind) for rank in range(len(first.ranks)))]
    names = [kind.name.lower().replace("_", " ") for kind in kinds]
    stages = plain_table("a micro-batch, by rank along pp", ["rank"], ["sections", *names, "update", "memory"])
    for rank, one in enumerate(first.ranks):
        times = [format_seconds(_seconds(first, rank, kind)) for kind in kinds]
        after = format_seconds(one.update_s), format_bytes(one.alone.need.size_bytes)
        add_row(stages, str(rank), str(len(one.alone.sections)), *times, *after)
    scaling = plain_table("steps", ["mesh", "sync"], ["predicted", "exposed sync", "samples/s"])
    for step in steps:
        step_time, sync_time = format_seconds(step.predicted_s), format_seconds(step.exposed_sync_s)
        add_row(scaling, str(step.mesh), step.path or "none", step_time, sync_time, format_rate(step.samples_per_s))
    return [Text("\n".join(lines)), stages, scaling, Text(_NOTE)]


def _of_schedule(step: MeshStep) -> list[str]:
    if step.program.schedule is None:
        return []
    return [f"  {step.schedule.name}: the ranks are idle for {step.idle_share:.1%} of their time in passes"]


def mesh_json(steps: Sequence[MeshStep]) -> Iterator[str]:
    """A line for each number of replicas."""
    for step in steps:
        yield json_line(
            {
                "name": step.program.name,
                "mesh": dict(step.mesh.sizes),
                "replicas": step.mesh.size(DATA_PARALLEL) // step.program.chips,
                "chips": step.program.chips,
                "sync": step.path,
                "schedule": step.schedule.name if step.program.schedule is not None else None,
                "predicted_s": step.predicted_s,
                "predicted_samples_per_s": step.samples_per_s,
                "predicted_pass_s": step.pass_s,
                "predicted_idle_share": step.idle_share,
                "predicted_waited_s": dict(step.waited_s),
                "predicted_exposed_sync_s": step.exposed_sync_s,
                "needed_bytes": [rank.alone.need.size_bytes for rank in step.ranks],
                "backed_by": _NOTE,
            }
        )


def _seconds(step: MeshStep, rank: int, kind: ActionKind) -> float:
    row = step.schedule.rows[rank]
    stages = {action.stage for action in row if action.kind is kind}
    return sum(step.ranks[rank].costs[kind, stage].predicted_s for stage in stages)
