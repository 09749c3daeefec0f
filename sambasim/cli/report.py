"""`sambasim report`: a PEF, or a run of it, as a page to look at."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sambasim.cli.prediction import Question
    from sambasim.records.read import RunRecords

_RUN_SUFFIX = ".jsonl"


@click.command("report")
@click.argument("subject", metavar="PEF|RUN.jsonl")
@click.option(
    "--html", "page", type=click.Path(path_type=Path), metavar="FILE", required=True, help="Where the page goes."
)
@click.option("--run", type=click.Path(path_type=Path), metavar="RUN.jsonl", help="Add what this run of it measured.")
@click.option("--arch", help="The device: sn10, sn30 or sn40. Default: the one that the PEF was compiled for.")
@click.option("--num-tiles", type=int, help="Tiles of it that one replica has. Default: as in the PEF, else all.")
@click.option("--cluster", help="Nodes and links. Default: the cluster that the device is usually built into.")
@click.option("--replicas", metavar="N,N,...", help="Of the scaling curves. Default: 1,2,4,...,1024.")
@click.option(
    "--output-folder",
    type=click.Path(path_type=Path),
    default=Path("out"),
    show_default=True,
    help="Where a PEF that is given by name is looked for.",
)
def report_command(
    subject: str,
    page: Path,
    run: Path | None,
    arch: str | None,
    num_tiles: int | None,
    cluster: str | None,
    replicas: str | None,
    output_folder: Path,
) -> None:
    """Write one HTML file that needs no network: what a device would do with a PEF, or what a run measured.

    Of a PEF: the step's timeline, its sections and what binds them, their pipelines, memory over time, scaling, and the
    operators with the lines that they come from. All of it is predicted. Of a RUN.jsonl, which `sambasim run --metrics`
    writes: its curves and its summary, all of it measured.

    \b
    Examples:
      sambasim report digits --html digits.html
      sambasim report digits --html digits.html --arch sn40 --replicas 1,8,64
      sambasim report run.jsonl --html run.html
      sambasim report digits --run run.jsonl --html digits.html
    """
    from sambasim.cli.prediction import Question, counts
    from sambasim.errors import MachineError, OptionError
    from sambasim.options.outputs import check_output_file
    from sambasim.pef import locate

    check_output_file(page, "the page", "another place: --html FILE")
    if subject.endswith(_RUN_SUFFIX):
        of_a_pef = {
            "--run": run,
            "--arch": arch,
            "--num-tiles": num_tiles,
            "--cluster": cluster,
            "--replicas": replicas,
        }
        given = [flag for flag, value in of_a_pef.items() if value is not None]
        if given:
            raise OptionError(
                f"{subject} is a run, in which nothing is predicted: {', '.join(given)} is for a PEF",
                remedy=f"sambasim report NAME.pef --run {subject} --html {page}",
            )
        _keep(Path(subject), page)
        text = _of_a_run(Path(subject))
    else:
        pef = locate(subject, output_folder)
        for given_file in (pef, run):
            _keep(given_file, page)
        question = Question(
            subject=str(pef),
            overrides=(),
            output_folder=output_folder,
            arch=arch,
            num_tiles=num_tiles,
            level=None,
            batch_sizes=(),
            replicas=sorted(counts(replicas, "--replicas")),
            cluster=cluster,
        )
        text = _of_a_pef(question, pef, run)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"the page cannot be written to {page}: {error.strerror}",
            remedy="make room there, or another place: --html FILE",
        ) from error
    click.echo(f"page {page} written: open it in a browser, it needs no network")


def _keep(given: Path | None, page: Path) -> None:
    """Raises OptionError if the page would be written over what it is made of."""
    from sambasim.errors import OptionError

    if given is not None and given.exists() and page.exists() and given.samefile(page):
        raise OptionError(f"--html {page} is what the page is made of", remedy="another place: --html FILE.html")


def _of_a_run(path: Path) -> str:
    from sambasim.records.read import read_run
    from sambasim.report.page.assemble import measured_page

    return measured_page(read_run(path), path.name)


def _of_a_pef(question: "Question", pef: Path, run: Path | None) -> str:
    from sambasim.cli.prediction import predictions
    from sambasim.pef import peek
    from sambasim.report.page.assemble import predicted_page

    digest = peek(pef).digest
    records = None if run is None else (_same(run, digest), run.name)
    (prediction,) = predictions(question, quiet=True)
    return predicted_page(prediction, digest, records)


def _same(path: Path, digest: str) -> "RunRecords":
    """The records of a run of the PEF with this digest, as far as they say of which it was."""
    from sambasim.errors import OptionError
    from sambasim.records.read import read_run

    records = read_run(path)
    if records.summary is not None and records.summary.pef_digest != digest:
        raise OptionError(
            f"{path} is a run of another PEF, {records.summary.pef_digest[:12]}; this one is {digest[:12]}",
            remedy=f"give the PEF that was run, or a page of the run alone: sambasim report {path} --html FILE",
        )
    return records
