"""`sambasim report`: an HTML page, or tables, about a PEF, a model or a run."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli import shared

if TYPE_CHECKING:
    from sambasim.cli.prediction import Question
    from sambasim.records.metrics import RunRecords

_RUN_SUFFIX = ".jsonl"


@click.command("report")
@click.argument("subject", metavar="PEF|MODEL|RUN.jsonl")
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
    subject: str,
    page: Path | None,
    tables: Path | None,
    run: Path | None,
    arch: str | None,
    num_tiles: int | None,
    cluster: str | None,
    replicas: str | None,
    output_folder: Path,
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
    from sambasim.cli.prediction import Question, counts, is_model, refuse_script
    from sambasim.errors import OptionError
    from sambasim.options.flags import MOST_REPLICAS
    from sambasim.options.load import check_output_file, check_output_folder
    from sambasim.pef import locate

    if page is None and tables is None:
        raise OptionError("no output is named", remedy=f"sambasim report {subject} --html FILE.html")
    if page is not None:
        check_output_file(page, "the page", "another place: --html FILE")
    if tables is not None:
        check_output_folder(tables, "the tables", "another place: --tables FOLDER")
    if subject.endswith(_RUN_SUFFIX):
        of_a_pef = {
            "--tables": tables,
            "--run": run,
            "--arch": arch,
            "--num-tiles": num_tiles,
            "--cluster": cluster,
            "--replicas": replicas,
        }
        given = [flag for flag, value in of_a_pef.items() if value is not None]
        if given or page is None:
            raise OptionError(
                f"{subject} is a run, and {', '.join(given)} is for predictions about a PEF",
                remedy=f"sambasim report NAME.pef --run {subject} --html {page or 'FILE.html'}",
            )
        _check_not_input(Path(subject), page)
        from sambasim.records.metrics import read_run
        from sambasim.report.page import measured_page

        shared.write_all({page: measured_page(read_run(Path(subject)), Path(subject).name)})
        return
    refuse_script(subject)
    pef = None if is_model(subject) else locate(subject, output_folder)
    if pef is None and run is not None:
        raise OptionError(
            f"{run} is a run of a PEF, and {subject} is a model", remedy=f"sambasim compile {subject}, and name its PEF"
        )
    for given_file in (pef, run):
        _check_not_input(given_file, page)
    question = Question(
        subject=subject if pef is None else str(pef),
        output_folder=output_folder,
        arch=arch,
        num_tiles=num_tiles,
        replicas=sorted(counts(replicas, "--replicas", MOST_REPLICAS)),
        cluster=cluster,
    )
    shared.write_all(_predicted(question, pef, run, page, tables))


def _check_not_input(given: Path | None, page: Path | None) -> None:
    from sambasim.errors import OptionError

    if given is not None and page is not None and given.exists() and page.exists() and given.samefile(page):
        raise OptionError(f"--html {page} would overwrite its own input", remedy="another place: --html FILE.html")


def _predicted(
    question: "Question", pef: Path | None, run: Path | None, page: Path | None, tables: Path | None
) -> dict[Path, str]:
    from sambasim.cli.prediction import predicted
    from sambasim.errors import OptionError
    from sambasim.pef import peek
    from sambasim.report.page import mesh_page, predicted_page
    from sambasim.report.sambatune import section_report_csv, summary_json
    from sambasim.simulation.sync import SyncPath

    header = None if pef is None else peek(pef)
    digest, checked = (None, None) if header is None else (header.digest, header.checked)
    records = None if run is None or digest is None else (_records_of(run, digest), run.name)
    found = predicted(question, tuple(SyncPath), quiet=False)
    if found.meshes:
        if page is None or tables is not None:
            raise OptionError(
                f"--tables is for replicas of one rank, and those of {question.subject} have several",
                remedy=f"sambasim report {question.subject} --html FILE.html",
            )
        (steps,) = found.meshes
        return {page: mesh_page(found.device, steps, digest, records, checked)}
    (prediction,) = found.alone
    texts: dict[Path, str] = {}
    if page is not None:
        texts[page] = predicted_page(prediction, digest, records, checked)
    if tables is not None:
        alone = prediction.scaled[SyncPath.RDU][0]
        texts[tables / "section_report.csv"] = section_report_csv(prediction.alone)
        texts[tables / "summary.json"] = summary_json(alone, prediction.program.name)
    return texts


def _records_of(path: Path, digest: str) -> "RunRecords":
    from sambasim.errors import OptionError
    from sambasim.records.metrics import read_run

    records = read_run(path)
    if records.summary is not None and records.summary.pef_digest != digest:
        raise OptionError(
            f"{path} is a run of another PEF, {records.summary.pef_digest[:12]}; this one is {digest[:12]}",
            remedy=f"give the PEF that was run, or a page of the run alone: sambasim report {path} --html FILE",
        )
    return records
