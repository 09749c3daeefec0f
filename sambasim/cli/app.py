"""`sambasim app`: run a script whose `import sambaflow` finds sambasim, and check it with `--check`."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click

import sambasim
from sambasim.bounded import one_line
from sambasim.cli.shared import COUNT, as_json
from sambasim.errors import OptionError, SambasimError
from sambasim.terminal.output import survive_closed_stdout
from sambasim.units import counted

if TYPE_CHECKING:
    from sambasim.samba.checks.job import Report

PATH_ENTRY = Path(sambasim.__file__).parent / "samba" / "shim" / "path_entry"

_STEPS = 16
_SCRIPT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("app", context_settings={"allow_interspersed_args": False})
@click.option("--check", is_flag=True, help="Run a few steps with every check, and report mistakes.")
@click.option("--check-steps", type=COUNT, metavar="N", help=f"Steps of a check; {_STEPS} by default.")
@as_json("Print the report of a check as one JSON line.")
@click.argument("script", metavar="SCRIPT.py", type=_SCRIPT)
@click.argument("arguments", metavar="ARGS...", nargs=-1, type=click.UNPROCESSED)
def app_command(script: Path, arguments: tuple[str, ...], check: bool, check_steps: int | None, as_json: bool) -> None:
    """Run a SambaFlow app unchanged: sambasim stands in for the package sambaflow.

    All arguments after SCRIPT.py go to the script, also -h. `python -m sambasim SCRIPT.py ...` is the same.

    With --check the script stops after N steps, in epochs of half as many. The exit code is 0 without findings, 1 with
    findings, and another if the check could not continue.

    \b
    Examples:
      sambasim app logreg.py compile --data-parallel -ws 2 --pef-name logreg
      mpirun -np 2 sambasim app logreg.py run --data-parallel --reduce-on-rdu --pef out/logreg/logreg.pef
      mpirun -np 2 sambasim app --check logreg.py run --data-parallel --pef out/logreg/logreg.pef
      sambasim app logreg.py run -h
    """
    if as_json and not check:
        raise click.UsageError("--json needs --check: it prints the report of a check as JSON")
    if check_steps is not None and not check:
        raise click.UsageError("--check-steps needs --check")
    survive_closed_stdout()
    file, code = script.absolute(), 0
    try:
        if check:
            code = _check_script(script, arguments, check_steps or _STEPS, as_json)
        else:
            _run_script(script, arguments)
    except BaseException as error:
        from sambasim.samba.ending import leave

        code = leave(error, file)
        # Python prints the text of a sys.exit(text).
        if isinstance(error, SystemExit) and not isinstance(error.code, int | None):
            raise SystemExit(error.code) from None
        raise SystemExit(code) from None
    raise SystemExit(code)


def _run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as Python would, with the `sambaflow` shim. It stays `__main__`, for handlers at exit."""
    file = script.absolute()
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(file.resolve().parent)
    if str(PATH_ENTRY) not in sys.path:
        sys.path.insert(1, str(PATH_ENTRY))
    # runpy.run_path would set `sys.argv[0]` to `__file__`, and drop the module at the end.
    loader, module = SourceFileLoader("__main__", str(file)), ModuleType("__main__")
    module.__file__, module.__loader__ = str(file), loader
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(str(file)), str(file)), module.__dict__)


def _check_script(script: Path, arguments: Sequence[str], steps: int, as_json: bool) -> int:
    """Run a script for so many optimizer steps, and print the report on rank 0. Returns 1 for findings, else 0."""
    from sambasim.runtime.machine.launcher import launched_rank
    from sambasim.samba.checks.job import CheckIsOver, begin_check

    if arguments and arguments[0] == "compile":
        raise OptionError(
            f"{script} compile takes no step, so there is nothing to check",
            remedy=f"compile it without --check, and then sambasim app --check {script} run …",
        )
    check, stdout, is_first = begin_check(steps), sys.stdout, launched_rank(os.environ) == 0
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            try:
                _run_script(script, arguments)
            except (CheckIsOver, StopIteration):
                pass  # an app that calls next() for batches does not expect short epochs
            except RuntimeError as error:
                if not isinstance(error.__cause__, StopIteration):  # Python's error if a generator calls next()
                    raise
            except SystemExit as leaving:
                if leaving.code not in (0, None):
                    raise
        report = check.report()
        if not (report.steps or report.findings):
            raise OptionError(
                f"{script} took no step, so there is nothing to check",
                remedy="check a command that trains or predicts, such as run; without OPT there is no step of training",
            )
    except BaseException as error:
        if as_json and is_first:
            print(_json(script, check.own_report(), error), file=stdout, flush=True)
        raise
    if is_first:
        print(_json(script, report) if as_json else _in_words(script, report), file=stdout, flush=True)
    return int(bool(report.findings))


def _in_words(script: Path, report: "Report") -> str:
    numbers = {"replica": report.replicas, "step": report.steps, "finding": len(report.findings)}
    replicas, steps, findings = (counted(count, noun) if count else f"no {noun}" for noun, count in numbers.items())
    cut = " with shortened epochs, so the scores differ from those of a run" if report.epochs_cut else ""
    lines = [f"check of {script}, {replicas}, {steps}{cut}: {findings}"]
    for finding in report.findings:
        where = [f"  where: {one_line(finding.where)}"] if finding.where else []
        lines += [one_line(finding.words), *where, f"  try:   {one_line(finding.remedy)}"]
    return "\n".join(lines)


def _json(script: Path, report: "Report", error: BaseException | None = None) -> str:
    """One line, with the code of each finding and of the error that ended the app: "app" for its own exceptions."""
    from sambasim.samba.ending import translated

    fields = None
    if error is not None:
        error = translated(error)
        fields = {"code": "app", "what": f"{type(error).__name__}: {error}", "where": None, "remedy": None}
        if isinstance(error, SambasimError):
            fields = {"code": error.code, "what": error.what, "where": error.where, "remedy": error.remedy}
    numbers = {"replicas": report.replicas, "steps": report.steps, "epochs_cut": report.epochs_cut}
    findings = [asdict(finding) for finding in report.findings]
    record = {"script": str(script), **numbers, "findings": findings, "error": fields}
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))
