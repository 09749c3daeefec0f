"""`sambasim tilestat`: what the tiles of a device would do, as `sntilestat` shows it."""

from pathlib import Path

import click

from sambasim.cli.inspect import one_pef
from sambasim.cli.terminal import show


@click.command("tilestat")
@click.argument("subject", required=False)
@click.option("-p", "--pef", "named", help="The same as the argument, as `run` spells it.")
@click.option("--arch", help="The device: sn10, sn30, sn40, or a TOML file. Default: the one it was compiled for.")
@click.option("--num-tiles", type=int, help="Tiles of it that the replica has. Default: as compiled, else all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@click.option(
    "--output-folder",
    type=click.Path(path_type=Path),
    default=Path("out"),
    show_default=True,
    help="Where a PEF that is given by name is looked for.",
)
def tilestat_command(
    subject: str | None, named: str | None, arch: str | None, num_tiles: int | None, as_json: bool, output_folder: Path
) -> None:
    """Predict the share of a step in which each tile executes, loads or waits, in the columns of `sntilestat`.

    SUBJECT is what `sambasim simulate` takes: a PEF, a config, or a model. One replica is predicted, without gradient
    sync. Nothing is measured: there is no device here to ask.

    \b
    Examples:
      sambasim tilestat digits
      sambasim tilestat out/digits/digits.pef --arch sn10 --num-tiles 2
      sambasim tilestat digits --json
    """
    from sambasim.cli.prediction import Question, predictions
    from sambasim.report.tilestat import tilestat, tilestat_view

    question = Question(
        subject=one_pef(subject, named),
        overrides=(),
        output_folder=output_folder,
        arch=arch,
        num_tiles=num_tiles,
        level=None,
        batch_sizes=(),
        replicas=(1,),
        cluster=None,
    )
    (facts,) = predictions(question, quiet=as_json)
    record = tilestat(facts)
    if as_json:
        click.echo(record.model_dump_json())
    else:
        show(*tilestat_view(record))
