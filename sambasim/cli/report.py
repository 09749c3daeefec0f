"""`sambasim report`: an HTML page, or tables, about a PEF, a model or a run."""

from pathlib import Path
from typing import Any

import click

from sambasim.cli import shared
from sambasim.terminal.output import phases


@click.command("report")
@shared.pef("subject", "[PEF|MODEL|RUN.jsonl]")
@click.option("--html", "page", type=shared.FILE, metavar="FILE", help="Write the page here.")
@click.option(
    "--tables",
    type=shared.FILE,
    metavar="FOLDER",
    help="Write section_report.csv and summary.json here, as SambaTune names them.",
)
@click.option("--run", type=shared.FILE, metavar="RUN.jsonl", help="Add the measurements of this run of the PEF.")
@shared.arch
@shared.num_tiles
@shared.cluster
@click.option("--replicas", metavar="N,N,...", help="Replicas of the scaling curves.  [default: 1,2,4,...,1024]")
@shared.output_folder
def report_command(
    subject: str, page: Path | None, tables: Path | None, run: Path | None, output_folder: Path, **asked: Any
) -> None:
    """Write one HTML page, or tables, about a PEF, a model or a run.

    For a PEF, a config (.toml) or a model (file.py:Name), everything is predicted: the timeline of a step, its sections
    and their limits, pipelines, memory over time, scaling, and the operators with their source lines; for replicas
    of several ranks their schedule, what each rank holds and where, and bytes by link. For a RUN.jsonl of
    `sambasim run --metrics`, everything is measured: its curves and its summary. The page needs no network.

    \b
    Examples:
      sambasim report digits --html digits.html
      sambasim report digits --html digits.html --arch sn40 --replicas 1,8,64
      sambasim report run.jsonl --html run.html
      sambasim report digits --run run.jsonl --html digits.html
      sambasim report configs/gpt_13b.toml --html gpt_13b.html
      sambasim report digits --tables out/digits
    """
    from sambasim.commands.report import Outputs, measured, predicted_texts

    outputs = Outputs(subject, page, tables)
    outputs.check()
    if subject.endswith(".jsonl"):
        of_a_pef = {"--tables": tables, "--run": run}
        of_a_pef |= {f"--{name.replace('_', '-')}": value for name, value in asked.items()}
        shared.write_all(measured(outputs, [flag for flag, value in of_a_pef.items() if value is not None]))
        return
    question = shared.question(subject=subject, output_folder=output_folder, **asked)
    with phases(quiet=False) as on_phase:
        texts = predicted_texts(outputs, question, run, on_phase)
    shared.write_all(texts)
