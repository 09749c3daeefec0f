"""`sambasim tilestat`: what the tiles of a device would do, as `sntilestat` shows it."""

from pathlib import Path

import click

from sambasim.cli import shared
from sambasim.cli.terminal import show


@click.command("tilestat")
@click.argument("subject", required=False)
@shared.pef_flag
@shared.arch
@shared.num_tiles
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@shared.output_folder
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
    from sambasim.report.sambatune import tilestat, tilestat_view

    question = Question(
        subject=shared.one_pef(subject, named),
        output_folder=output_folder,
        arch=arch,
        num_tiles=num_tiles,
        replicas=(1,),
    )
    (facts,) = predictions(question, quiet=as_json)
    record = tilestat(facts)
    if as_json:
        print(record.model_dump_json())
    else:
        show(*tilestat_view(record))
