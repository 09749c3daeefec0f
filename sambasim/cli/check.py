"""`sambasim app --check`: run an app for a few steps, and report what is wrong with its replicas."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pydantic import BaseModel, ConfigDict

from sambasim.bounded import one_line
from sambasim.cli.app import run_script
from sambasim.errors import OptionError, SambasimError
from sambasim.runtime.launcher import launched_rank

if TYPE_CHECKING:
    from sambasim.samba.checks.job import Report

FOUND = 1
"""The exit code of a check with findings. Those of errors are higher."""


class Message(BaseModel):
    """A finding, or the error that ended the app. `code` is that of the finding or of the error, and "app" for an
    exception of the app."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    what: str
    where: str | None
    remedy: str | None


class CheckRecord(BaseModel):
    """What `--json` prints. `epochs_cut` says that the app has seen less data than in a run; `error` is what ended the
    app before the end of the check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: str
    replicas: int
    steps: int
    epochs_cut: bool
    findings: tuple[Message, ...]
    error: Message | None


def check_script(script: Path, file: Path, arguments: Sequence[str], *, steps: int, as_json: bool) -> int:
    """Run a script as `run_script` does, for at most `steps` optimizer steps, and print the report on rank 0.

    as_json: print the report as one line, and the output of the script on stderr

    Returns the exit code: 0, or FOUND. Raises OptionError for the command compile, before it writes anything, and for a
    script that ends without a step or a finding. An exception of the script passes through, unless it ends the check.
    """
    from sambasim.samba.checks.job import begin_check

    if arguments and arguments[0] == "compile":
        raise OptionError(
            f"{script} compile takes no step, so there is nothing to check",
            remedy=f"compile it without --check, and then sambasim app --check {script} run …",
        )
    check, stdout = begin_check(steps), sys.stdout
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            _run(script, file, arguments)
        report = check.report()
        if not (report.steps or report.findings):
            raise OptionError(
                f"{script} took no step, so there is nothing to check",
                remedy="check a command that trains or predicts, such as run; without OPT there is no step of training",
            )
    except BaseException as error:
        if as_json and launched_rank(os.environ) == 0:
            _print_json(stdout, script, check.own_report(), error)
        raise
    if launched_rank(os.environ) == 0:
        if as_json:
            _print_json(stdout, script, report)
        else:
            stdout.write(_in_words(script, report))
            stdout.flush()
    return FOUND if report.findings else 0


def _run(script: Path, file: Path, arguments: Sequence[str]) -> None:
    from sambasim.samba.checks.job import CheckIsOver

    try:
        run_script(script, file, arguments)
    except (CheckIsOver, StopIteration):
        pass  # an app that calls next() for batches does not expect short epochs
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):  # Python's error if a generator calls next()
            raise
    except SystemExit as leaving:
        if leaving.code not in (0, None):
            raise


def _in_words(script: Path, report: "Report") -> str:
    replicas = "1 replica" if report.replicas == 1 else f"{report.replicas} replicas"
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    number = len(report.findings)
    found = "no finding" if not number else "1 finding" if number == 1 else f"{number} findings"
    cut = " with shortened epochs, so the scores differ from those of a run" if report.epochs_cut else ""
    lines = [f"check of {script}, {replicas}, {steps}{cut}: {found}"]
    for finding in report.findings:
        where = [f"  where: {one_line(finding.where)}"] if finding.where else []
        lines += [one_line(finding.words), *where, f"  try:   {one_line(finding.remedy)}"]
    return "\n".join(lines) + "\n"


def _print_json(stdout: TextIO, script: Path, report: "Report", error: BaseException | None = None) -> None:
    record = CheckRecord(
        script=str(script),
        replicas=report.replicas,
        steps=report.steps,
        epochs_cut=report.epochs_cut,
        findings=tuple(Message(**asdict(finding)) for finding in report.findings),
        error=None if error is None else _of_error(error),
    )
    stdout.write(record.model_dump_json() + "\n")
    stdout.flush()


def _of_error(error: BaseException) -> Message:
    from sambasim.samba.shim.ending import translated

    error = translated(error)
    if isinstance(error, SambasimError):
        return Message(code=error.code, what=error.what, where=error.where, remedy=error.remedy)
    return Message(code="app", what=f"{type(error).__name__}: {error}", where=None, remedy=None)
