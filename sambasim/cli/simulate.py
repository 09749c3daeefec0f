"""`sambasim simulate`: what a device would do with a PEF, or with a model."""

from pathlib import Path

import click

from sambasim.cli import shared
from sambasim.cli.terminal import show


@click.command("simulate")
@click.argument("subject", required=False)
@shared.pef_flag
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Any field of a model's config.")
@shared.arch
@shared.num_tiles
@click.option("--o0", "level", flag_value="o0", help="One operator a section.")
@click.option("--o1", "level", flag_value="o1", help="Operators of one module share a section, at most 8.")
@click.option("--o3", "level", flag_value="o3", help="The cut that is predicted fastest. Default: as compiled.")
@click.option("-b", "--batch-size", "batch_sizes", metavar="N,...", help="Batch sizes of a replica. Default: its own.")
@click.option("--replicas", metavar="N,...", help="Numbers of replicas: 1,2,4,1024.")
@click.option("--sync", default="host,rdu", show_default=True, help="Ways to sync gradients: host, rdu, or both.")
@shared.cluster
@click.option(
    "--sections", type=click.IntRange(min=0), default=10, show_default=True, help="Slowest sections to print."
)
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="Write the rows of all replicas here.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw samples/s over replicas, as an SVG file.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Write a step as a trace for Perfetto: most replicas, last --sync, first -b.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each batch size, with every section.")
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
    """Predict a training step on a device: how long, what binds it, which sections take the time, how it scales.

    SUBJECT is a PEF, by path or name; or a config (.toml) or a model (file.py:Name), which is captured on tensors
    without memory, whatever its size. Nothing is measured here. Sections are cut for the device and the tiles that are
    asked for, as `compile` would cut them. A PEF at another batch size is scaled; a model is captured again.
    `sambasim validate` tells how far such predictions are off.

    \b
    Examples:
      sambasim simulate digits
      sambasim simulate digits --arch sn40 --replicas 1,2,4,8,16 --sync rdu
      sambasim simulate configs/char_gpt.toml --batch-size 16,64,256 --num-tiles 4
      sambasim simulate digits --replicas 1,8,64,512 --csv scaling.csv --plot scaling.svg
    """
    from sambasim.cli.prediction import Question, counts, paths, predictions
    from sambasim.options.outputs import check_output_file
    from sambasim.report.simulation import (
        predicted_trace,
        scaling_csv,
        scaling_plot,
        scaling_records,
        scaling_table,
        simulation_json,
        simulation_report,
    )

    for file, what in ((csv_file, "CSV file"), (plot, "plot"), (trace, "trace")):
        if file is not None:
            check_output_file(file, f"the {what}", f"--{what.split()[0].lower()} FILE")
    numbers = counts(replicas, "--replicas")
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
    found = predictions(question, quiet=as_json)
    rows = [row for facts in found for row in scaling_records(facts, ways)]
    if as_json:
        for facts in found:
            print(simulation_json(facts, ways))
    else:
        for facts in found:
            show(*simulation_report(facts, sections))
        if len(rows) > 1:
            show(scaling_table(rows))
    if csv_file is not None:
        _write(csv_file, scaling_csv(rows))
    if trace is not None:
        most = max(found[0].scaled[ways[-1]], key=lambda step: step.placement.replicas)
        _write(trace, predicted_trace(most, found[0].program.name))
    if plot is not None:
        _write(plot, scaling_plot(f"{found[0].program.name} on {found[0].alone.budget.where}", rows))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
