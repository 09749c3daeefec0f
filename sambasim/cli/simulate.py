"""`sambasim simulate` and `tilestat`: the predicted step of a subject."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sambasim.cli import shared
from sambasim.terminal.output import phases, show

if TYPE_CHECKING:
    from sambasim.commands.question import Predicted
    from sambasim.simulation.sync import SyncPath


@click.command("simulate")
@shared.pef("subject", "[SUBJECT]")
@shared.overrides("For a config or a model: set any field.")
@shared.arch
@shared.num_tiles
@click.option("--o0", "level", flag_value="o0", help="One operator per section.")
@click.option("--o1", "level", flag_value="o1", help="Operators of one module share a section, at most 8.")
@click.option(
    "--o3", "level", flag_value="o3", help="The grouping with the shortest predicted step.  [default: as compiled]"
)
@click.option(
    "-b", "--batch-size", "batch_sizes", metavar="N,...", help="Batch sizes of a replica.  [default: as compiled]"
)
@click.option(
    "--replicas", metavar="N,...", default="1", show_default=True, help="Numbers of replicas, such as 1,2,4,1024."
)
@click.option("--sync", default="host,rdu", show_default=True, help="Sync paths of gradients: host, rdu, or both.")
@shared.cluster
@click.option(
    "--sections",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many of the slowest sections to print.",
)
@click.option("--csv", type=shared.FILE, help="Write one row for each number of replicas as CSV.")
@click.option("--plot", type=shared.FILE, help="Draw samples/s over replicas as SVG.")
@click.option(
    "--trace",
    type=shared.FILE,
    help="Write one step as a trace for Perfetto: the most replicas, the last sync path, the first batch size.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line for each batch size, with every section.")
@shared.output_folder
def simulate_command(
    sections: int, csv: Path | None, plot: Path | None, trace: Path | None, as_json: bool, **asked: Any
) -> None:
    """Predict a training step on a device: its time, its limits, its scaling.

    SUBJECT is a PEF, by path or name, a config (.toml) or a model (file.py:Name). A model is captured on tensors
    without memory, so it can have any size. Nothing is measured. Operators are grouped into sections as `compile` does
    it for this device and these tiles. For another batch size, the times of a PEF are scaled, and a model is captured
    again. Replicas of several ranks keep their sections and, in a PEF, its batch size. `sambasim validate` shows the
    errors of such predictions.

    \b
    Examples:
      sambasim simulate digits
      sambasim simulate digits --arch sn40 --replicas 1,2,4,8,16 --sync rdu
      sambasim simulate configs/char_gpt.toml --batch-size 16,64,256 --num-tiles 4
      sambasim simulate digits --replicas 1,8,64,512 --csv scaling.csv --plot scaling.svg
    """
    from sambasim.commands.outputs import check_output_file
    from sambasim.commands.question import predicted

    files = {"CSV file": csv, "plot": plot, "trace": trace}
    for what, file in files.items():
        if file is not None:
            check_output_file(file, f"the {what}", f"--{what.split()[0].lower()} FILE")
    question = shared.question(**asked)
    with phases(quiet=as_json) as on_phase:
        found = predicted(question, on_phase)
    texts = _show_meshes(found, as_json) if found.meshes else _show_alone(found, question.sync, sections, as_json)
    shared.write_all({file: texts[what]() for what, file in files.items() if file is not None}, quiet=as_json)


def _show_alone(
    predicted: "Predicted", ways: "Sequence[SyncPath]", slowest: int, as_json: bool
) -> Mapping[str, Callable[[], str]]:
    """Print what is predicted. Returns, by file, a function that makes its text."""
    from sambasim.report.findings import Findings
    from sambasim.report.output import csv_text
    from sambasim.report.simulation import (
        predicted_trace,
        scaling_plot,
        scaling_records,
        scaling_table,
        simulation_json,
        simulation_report,
    )

    found = predicted.alone
    rows = [row for facts in found for row in scaling_records(facts, ways)]
    if as_json:
        for facts in found:
            print(simulation_json(Findings(facts), ways))
    else:
        for facts in found:
            show(*simulation_report(Findings(facts), slowest))
        if len(rows) > 1:
            show(scaling_table(rows))
    first = found[0]
    most = max(first.scaled[ways[-1]], key=lambda step: step.placement.replicas)
    return {
        "CSV file": lambda: csv_text([row.model_dump() for row in rows]),
        "trace": lambda: predicted_trace(most, first.program.name),
        "plot": lambda: scaling_plot(f"{first.program.name} on {first.alone.budget.where}", rows),
    }


def _show_meshes(predicted: "Predicted", as_json: bool) -> Mapping[str, Callable[[], str]]:
    """As `_show_alone`, for replicas of several ranks."""
    from sambasim.report.mesh import mesh_csv_rows, mesh_json, mesh_plot, mesh_report
    from sambasim.report.mesh_trace import mesh_trace
    from sambasim.report.output import csv_text

    for steps in predicted.meshes:
        if as_json:
            for line in mesh_json(steps):
                print(line)
        else:
            show(*mesh_report(steps))
    largest = max(reversed(predicted.meshes[0]), key=lambda step: step.mesh.world_size)  # of equal ones, the last
    return {
        "CSV file": lambda: csv_text([row for steps in predicted.meshes for row in mesh_csv_rows(steps)]),
        "trace": lambda: mesh_trace(largest),
        "plot": lambda: mesh_plot(predicted.meshes),
    }


@click.command("tilestat")
@shared.pef("subject", "[SUBJECT]")
@shared.arch
@shared.num_tiles
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@shared.output_folder
def tilestat_command(as_json: bool, **asked: Any) -> None:
    """Predict how busy each tile is, in the columns of sntilestat.

    The columns are shares of a step in which a tile executes, loads or waits. SUBJECT is a PEF, a config or a model, as
    for `sambasim simulate`. The prediction is for one replica, without gradient sync. Nothing is measured.

    \b
    Examples:
      sambasim tilestat digits
      sambasim tilestat out/digits/digits.pef --arch sn10 --num-tiles 2
      sambasim tilestat digits --json
    """
    from sambasim.commands.question import predictions
    from sambasim.report.output import json_line
    from sambasim.report.sambatune import tilestat, tilestat_view

    question = shared.question(replicas="1", **asked)
    with phases(quiet=as_json) as on_phase:
        (facts,) = predictions(question, on_phase)
    if as_json:
        print(json_line(tilestat(facts)))
    else:
        show(*tilestat_view(facts))
