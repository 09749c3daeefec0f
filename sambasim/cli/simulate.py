"""`sambasim simulate` and `tilestat`: the predicted step of a subject."""

from pathlib import Path
from typing import Any

import click

from sambasim.cli import shared
from sambasim.terminal.output import phases, show


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
    from sambasim.report.formats import predicted_trace
    from sambasim.report.simulation import csv_rows, scaling_plot, simulation_json, simulation_report
    from sambasim.report.tables import csv_text

    for what, file in {"CSV file": csv, "plot": plot, "trace": trace}.items():
        if file is not None:
            check_output_file(file, f"the {what}", f"--{what.split()[0].lower()} FILE")
    question = shared.question(**asked)
    with phases(quiet=as_json) as on_phase:
        predictions = predicted(question, on_phase)
    if as_json:
        for prediction in predictions:
            print(*simulation_json(prediction, question.sync), sep="\n")
    else:
        show(*simulation_report(predictions, question.sync, sections))
    texts, of_sizes = {}, [prediction.along(question.sync) for prediction in predictions]
    if csv is not None:
        texts[csv] = csv_text(csv_rows([step for steps in of_sizes for step in steps]))
    if trace is not None:
        largest = max(predictions[0].steps[question.sync[-1]], key=lambda step: step.mesh.world_size)
        texts[trace] = predicted_trace(largest)
    if plot is not None:
        texts[plot] = scaling_plot(of_sizes)
    shared.write_all(texts, quiet=as_json)


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
    from sambasim.commands.question import predicted
    from sambasim.report.formats import tilestat, tilestat_view
    from sambasim.report.tables import json_line

    question = shared.question(replicas="1", **asked)
    with phases(quiet=as_json) as on_phase:
        (facts,) = predicted(question, on_phase, one_device=True)
    if as_json:
        print(json_line(tilestat(facts)))
    else:
        show(*tilestat_view(facts))
