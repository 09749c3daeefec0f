"""`sambasim simulate`, `tilestat`, `devices` and `validate`: predictions, and the devices that they are about."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli import shared
from sambasim.cli.terminal import phases, show
from sambasim.options.flags import MOST_REPLICAS

if TYPE_CHECKING:
    from sambasim.ir.program import Program
    from sambasim.published.rows import Row
    from sambasim.report.devices import RowRecord
    from sambasim.simulation.mesh import MeshStep
    from sambasim.simulation.prediction import Prediction
    from sambasim.simulation.sync import SyncPath


@click.command("simulate")
@click.argument("subject", required=False, shell_complete=shared.pef_names)
@shared.pef_flag
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="For a config or a model: set any field.")
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
@click.option("--replicas", metavar="N,...", help="Numbers of replicas, such as 1,2,4,1024.  [default: 1]")
@click.option("--sync", default="host,rdu", show_default=True, help="Sync paths of gradients: host, rdu, or both.")
@shared.cluster
@click.option(
    "--sections",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many of the slowest sections to print.",
)
@click.option("--csv", "csv_file", type=shared.FILE, help="Write one row for each number of replicas as CSV.")
@click.option("--plot", type=shared.FILE, help="Draw samples/s over replicas as SVG.")
@click.option(
    "--trace",
    type=shared.FILE,
    help="Write one step as a trace for Perfetto: the most replicas, the last sync path, the first batch size.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line for each batch size, with every section.")
@shared.output_folder
def simulate_command(
    subject: str | None,
    named: str | None,
    overrides: tuple[str, ...],
    arch: str | None,
    num_tiles: int | None,
    level: str | None,
    batch_sizes: str | None,
    replicas: str | None,
    sync: str,
    cluster: str | None,
    sections: int,
    csv_file: Path | None,
    plot: Path | None,
    trace: Path | None,
    as_json: bool,
    output_folder: Path,
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
    from sambasim.cli.prediction import Question, counts, paths, predicted
    from sambasim.options.load import check_output_file

    for file, what in ((csv_file, "CSV file"), (plot, "plot"), (trace, "trace")):
        if file is not None:
            check_output_file(file, f"the {what}", f"--{what.split()[0].lower()} FILE")
    numbers = counts(replicas, "--replicas", MOST_REPLICAS)
    question = Question(
        subject=shared.one_pef(subject, named),
        overrides=overrides,
        output_folder=output_folder,
        arch=arch,
        num_tiles=num_tiles,
        level=level,
        batch_sizes=counts(batch_sizes, "--batch-size"),
        replicas=numbers or (1,),
        cluster=cluster,
    )
    ways = paths(sync)
    found = predicted(question, ways, quiet=as_json)
    texts = _show_meshes(found.meshes, as_json) if found.meshes else _show_alone(found.alone, ways, sections, as_json)
    files = {"csv": csv_file, "trace": trace, "plot": plot}
    shared.write_all({file: texts[what]() for what, file in files.items() if file is not None}, quiet=as_json)


def _show_alone(
    found: "Sequence[Prediction]", ways: "Sequence[SyncPath]", slowest: int, as_json: bool
) -> Mapping[str, Callable[[], str]]:
    """Print `found`. Returns, by flag, a function that makes the text of the file."""
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
        "csv": lambda: csv_text([row.model_dump() for row in rows]),
        "trace": lambda: predicted_trace(most, first.program.name),
        "plot": lambda: scaling_plot(f"{first.program.name} on {first.alone.budget.where}", rows),
    }


def _show_meshes(meshes: "Sequence[Sequence[MeshStep]]", as_json: bool) -> Mapping[str, Callable[[], str]]:
    """Print the steps of each batch size. Returns what makes the text of each file, by flag."""
    from sambasim.report.mesh import mesh_csv_rows, mesh_json, mesh_plot, mesh_report
    from sambasim.report.mesh_trace import mesh_trace
    from sambasim.report.output import csv_text

    for steps in meshes:
        if as_json:
            for line in mesh_json(steps):
                print(line)
        else:
            show(*mesh_report(steps))
    largest = max(reversed(meshes[0]), key=lambda step: step.mesh.world_size)  # of equal ones, the last
    return {
        "csv": lambda: csv_text([row for steps in meshes for row in mesh_csv_rows(steps)]),
        "trace": lambda: mesh_trace(largest),
        "plot": lambda: mesh_plot(meshes),
    }


@click.command("tilestat")
@click.argument("subject", required=False, shell_complete=shared.pef_names)
@shared.pef_flag
@shared.arch
@shared.num_tiles
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@shared.output_folder
def tilestat_command(
    subject: str | None, named: str | None, arch: str | None, num_tiles: int | None, as_json: bool, output_folder: Path
) -> None:
    """Predict how busy each tile is, in the columns of sntilestat.

    The columns are shares of a step in which a tile executes, loads or waits. SUBJECT is a PEF, a config or a model, as
    for `sambasim simulate`. The prediction is for one replica, without gradient sync. Nothing is measured.

    \b
    Examples:
      sambasim tilestat digits
      sambasim tilestat out/digits/digits.pef --arch sn10 --num-tiles 2
      sambasim tilestat digits --json
    """
    from sambasim.cli.prediction import Question, predictions
    from sambasim.report.output import json_line
    from sambasim.report.sambatune import tilestat, tilestat_view

    question = Question(
        subject=shared.one_pef(subject, named),
        output_folder=output_folder,
        arch=arch,
        num_tiles=num_tiles,
        replicas=(1,),
    )
    (facts,) = predictions(question, quiet=as_json)
    if as_json:
        print(json_line(tilestat(facts)))
    else:
        show(*tilestat_view(facts))


@click.command("devices")
@shared.no_argument("--pef")
@click.option("--cluster", metavar="NAME|FILE", help="Show only this cluster.  [default: all]")
@click.option("--arch", metavar="NAME|FILE", help="Show only this device.  [default: all]")
@click.option("--num-tiles", type=int, help="Tiles that one replica has.  [default: as in the PEF, else all of an RDU]")
@click.option(
    "--replicas",
    type=click.IntRange(1, MOST_REPLICAS),
    help="Number of replicas.  [default: as many as fit on one node]",
)
@click.option("-p", "--pef", shell_complete=shared.pef_names, help="Take device and tiles from this PEF.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line, in SI base units.")
@shared.output_folder
def devices_command(
    cluster: str | None,
    arch: str | None,
    num_tiles: int | None,
    replicas: int | None,
    pef: str | None,
    as_json: bool,
    output_folder: Path,
) -> None:
    """List devices and clusters, and the placement of replicas on RDUs, or of the ranks of a PEF's replicas.

    Each figure has its source. If nobody published it, the source is "estimate", or how it was derived. A run with
    `--cluster` has the same placement, on one simulated node for each node of the MPI job.

    \b
    Examples:
      sambasim devices
      sambasim devices --arch sn30 --num-tiles 4 --replicas 20
      sambasim devices --pef digits --cluster farm.toml --json
    """
    from sambasim.cli.prediction import several_replicas
    from sambasim.hardware.budget import budget_of, load_calibration
    from sambasim.hardware.placement import inventory_of, place
    from sambasim.hardware.spec import cluster_names, device_names, load_cluster, load_device
    from sambasim.ir.mesh import mesh_of
    from sambasim.pef import locate, read
    from sambasim.report.devices import inventory_json, inventory_report

    document = None if pef is None else read(locate(pef, output_folder))
    compiled, program = ({}, None) if document is None else (document.compile_options, document.program)
    inventory = inventory_of(compiled, arch=arch, tiles=num_tiles, cluster=cluster)
    device, tiles = inventory.device, inventory.tiles
    budget = budget_of(device, load_calibration(), tiles)
    of_a_node = place(1, device, tiles, inventory.cluster).per_full_node
    mesh = None
    if program is None or program.ranks_of_replica == 1:
        placement = place(replicas or of_a_node, device, tiles, inventory.cluster)
    else:
        ranks = program.ranks_of_replica
        several = several_replicas(program, [replicas] if replicas else [])
        count = replicas or (max(1, of_a_node // ranks) if several else 1)
        placement = place(count * ranks, device, tiles, inventory.cluster, "rank")
        mesh = mesh_of(program.mesh, count * ranks)
    one_device = arch is not None or pef is not None
    devices = [device] if one_device else [load_device(name) for name in device_names()]
    one_cluster = one_device or cluster is not None
    clusters = [inventory.cluster] if one_cluster else [load_cluster(name) for name in cluster_names()]
    if as_json:
        print(inventory_json(devices, clusters, inventory, placement, mesh))
    else:
        show(*inventory_report(devices, clusters, inventory, budget, placement, mesh))


@click.command("validate")
@shared.no_argument("--only")
@click.option("--only", metavar="WORDS", help="Only rows with these words in their name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def validate_command(only: str | None, as_json: bool) -> None:
    """Compare predictions with published measurements.

    Each model is captured on tensors without memory and predicted on the device and tiles of the measurement. All rows
    take one to two minutes.

    \b
    Examples:
      sambasim validate
      sambasim validate --only "1 layer"
    """
    from sambasim.errors import OptionError
    from sambasim.published.rows import published_rows
    from sambasim.report.devices import validation, validation_table

    rows = [row for row in published_rows() if only is None or only.lower() in row.name.lower()]
    if not rows:
        names = ", ".join(dict.fromkeys(f'"{row.name}"' for row in published_rows()))
        raise OptionError(f"no published row has {only!r} in its name", remedy=f"one of {names}")
    with phases(quiet=as_json) as report_phase:
        record = validation(_predict(rows, report_phase))
    if as_json:
        print(record.model_dump_json())
    else:
        show(validation_table(record))


def _predict(rows: "Sequence[Row]", report_phase: Callable[[str], None]) -> "list[RowRecord]":
    from sambasim.hardware.spec import load_cluster, load_device
    from sambasim.report.devices import row_record
    from sambasim.simulation.prediction import predict
    from sambasim.simulation.sync import SyncPath

    programs: dict[tuple[str, str, int], Program] = {}
    records = []
    for row in rows:
        key = (row.model, repr(sorted(row.args.items())), row.batch_size)
        if key not in programs:
            report_phase(f"capture {row.name}")
            programs[key] = _captured(row)
        report_phase(f"predict {row.name}, {row.level}")
        device = load_device(row.device)
        cluster = load_cluster(device.cluster)
        found = predict(programs[key], device, row.tiles, row.level, cluster, (row.replicas,), mapped_by=row.mapped_by)
        step, (scaled,) = found.alone, found.scaled[SyncPath.RDU]
        predicted = row.figure_of(step.device_s, scaled.predicted_s)
        records.append(row_record(row, predicted, step))
    return records


def _captured(row: "Row") -> "Program":
    from sambasim.compiler.front import Example, compile_shapes
    from sambasim.options.compile import CompileOptions
    from sambasim.options.training import OptimizerOptions, TrainingOptions
    from sambasim.published.models import MODELS

    make, batch = MODELS[row.model]
    options = CompileOptions(
        optimizer=OptimizerOptions(name="adamw"),
        training=TrainingOptions(batch_size=row.batch_size),
        pef_name=row.model,
        arch=row.device,
        num_tiles=row.tiles,
    )
    return compile_shapes(
        lambda: make(**row.args), lambda model: Example(batch(row.batch_size, **row.args), True), options
    )
