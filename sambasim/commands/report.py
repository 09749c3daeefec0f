"""What `report` writes: a page about a run, or a page and tables about a PEF or a model."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sambasim.commands.outputs import check_output_file, check_output_folder
from sambasim.commands.question import Question, predicted
from sambasim.commands.subject import OnPhase, is_model
from sambasim.errors import OptionError
from sambasim.pef import locate, peek
from sambasim.records.metrics import RunRecords, read_run
from sambasim.report.formats import section_report_csv, summary_json
from sambasim.report.page import measured_page, predicted_page
from sambasim.simulation.sync import SyncPath


class Outputs(NamedTuple):
    """Where the page and the folder of tables about `subject` are written."""

    subject: str
    page: Path | None
    tables: Path | None

    def check(self) -> None:
        """Raises OptionError if there are none, or they cannot be written."""
        if self.page is None and self.tables is None:
            raise OptionError("no output is named", remedy=f"sambasim report {self.subject} --html FILE.html")
        if self.page is not None:
            check_output_file(self.page, "the page", "another place: --html FILE")
        if self.tables is not None:
            check_output_folder(self.tables, "the tables", "another place: --tables FOLDER")

    def check_input(self, file: Path | None) -> None:
        page = self.page
        if file is not None and page is not None and file.exists() and page.exists() and file.samefile(page):
            raise OptionError(f"--html {page} would overwrite its own input", remedy="another place: --html FILE.html")


def measured(outputs: Outputs, flags: Sequence[str]) -> dict[Path, str]:
    """The page about a run. Raises OptionError for `flags`, which are for predictions."""
    subject, page, _ = outputs
    if flags or page is None:
        raise OptionError(
            f"{subject} is a run, and {', '.join(flags)} is for predictions about a PEF",
            remedy=f"sambasim report NAME.pef --run {shlex.quote(subject)} --html {page or 'FILE.html'}",
        )
    outputs.check_input(Path(subject))
    return {page: measured_page(read_run(Path(subject)), Path(subject).name)}


def predicted_texts(outputs: Outputs, question: Question, run: Path | None, on_phase: OnPhase) -> dict[Path, str]:
    """What is predicted, with the measurements of a `run` of the PEF, by file."""
    subject, page, tables = outputs
    pef = None if is_model(subject) else locate(subject, question.output_folder)
    if pef is None and run is not None:
        raise OptionError(
            f"{run} is a run of a PEF, and {subject} is a model", remedy=f"sambasim compile {subject}, and name its PEF"
        )
    for file in (pef, run):
        outputs.check_input(file)
    header = None if pef is None else peek(pef)
    digest, checked = (None, None) if header is None else (header.digest, header.checked)
    records = None if run is None or digest is None else (_records_of(run, digest), run.name)
    name = subject if pef is None else str(pef)
    (prediction,) = predicted(replace(question, subject=name, replicas=sorted(question.replicas)), on_phase)
    step = prediction.steps[SyncPath.RDU][0]
    if tables is not None and step.several_ranks:
        raise OptionError(
            f"--tables is for replicas of one rank, and those of {name} have several",
            remedy=f"sambasim report {name} --html FILE.html",
        )
    texts: dict[Path, str] = {}
    if page is not None:
        texts[page] = predicted_page(prediction, digest, records, checked)
    if tables is not None:
        texts[tables / "section_report.csv"] = section_report_csv(prediction.alone)
        texts[tables / "summary.json"] = summary_json(step.synced, prediction.program.name)
    return texts


def _records_of(path: Path, digest: str) -> RunRecords:
    records = read_run(path)
    if records.summary is not None and records.summary.pef_digest != digest:
        raise OptionError(
            f"{path} is a run of another PEF, {records.summary.pef_digest[:12]}; this one is {digest[:12]}",
            remedy=f"give the PEF that was run, or a page of the run alone: sambasim report {path} --html FILE",
        )
    return records
