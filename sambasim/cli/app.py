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
from sambasim.bounded import LARGEST_COUNT, one_line
from sambasim.errors import OptionError, SambasimError
from sambasim.terminal.output import survive_closed_stdout

if TYPE_CHECKING:
    from sambasim.samba.checks.job import Report

PATH_ENTRY = Path(sambasim.__file__).parent / "samba" / "shim" / "path_entry"

STEPS = 16

FOUND = 1
"""The exit code of a check with findings. Those of errors are higher."""


@click.command("app", context_settings={"allow_interspersed_args": False})
@click.option("--check", is_flag=True, help="Run a few steps with every check, and report mistakes.")
@click.option(
    "--check-steps", type=click.IntRange(1, LARGEST_COUNT), metavar="N", help=f"Steps of a check; {STEPS} by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report of a check as one JSON line.")
@click.argument("script", metavar="SCRIPT.py", type=click.Path(exists=True, dir_okay=False, path_type=Path))
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
            code = check_script(script, file, arguments, steps=check_steps or STEPS, as_json=as_json)
        else:
            run_script(script, file, arguments)
    except SystemExit as error:
        code = _leave(error, file)
        # Python prints the text of a sys.exit(text).
        raise SystemExit(code if isinstance(error.code, int | None) else error.code) from None
    except BaseException as error:
        raise SystemExit(_leave(error, file)) from None
    raise SystemExit(code)


def run_script(script: Path, file: Path, arguments: Sequence[str]) -> None:
    """Run a script as Python would, with the `sambaflow` shim. It stays `__main__`, for handlers at exit. `script`
    becomes `sys.argv[0]`, the absolute path `file` becomes `__file__`."""
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(file.resolve().parent)
    if str(PATH_ENTRY) not in sys.path:
        sys.path.insert(1, str(PATH_ENTRY))
    # runpy.run_path would set `sys.argv[0]` to `__file__`, and drop the module at the end.
    loader = SourceFileLoader("__main__", str(file))
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = str(file), loader
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(str(file)), str(file)), module.__dict__)


def _leave(error: BaseException, script: Path) -> int:
    from sambasim.samba.ending import leave

    return leave(error, script)


def check_script(script: Path, file: Path, arguments: Sequence[str], *, steps: int, as_json: bool) -> int:
    """Run a script as `run_script` does, for at most `steps` optimizer steps, and print the report on rank 0. Returns 0
    or FOUND. Raises OptionError for the command compile, and for a script without a step or a finding."""
    from sambasim.runtime.machine.launcher import launched_rank
    from sambasim.samba.checks.job import begin_check

    if arguments and arguments[0] == "compile":
        raise OptionError(
            f"{script} compile takes no step, so there is nothing to check",
            remedy=f"compile it without --check, and then sambasim app --check {script} run …",
        )
    check, stdout, is_first = begin_check(steps), sys.stdout, launched_rank(os.environ) == 0
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            _run_for_check(script, file, arguments)
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
    return FOUND if report.findings else 0


def _run_for_check(script: Path, file: Path, arguments: Sequence[str]) -> None:
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
    def counted(number: int, thing: str) -> str:
        return f"{number or 'no'} {thing}{'s' * (number > 1)}"

    cut = " with shortened epochs, so the scores differ from those of a run" if report.epochs_cut else ""
    found = counted(len(report.findings), "finding")
    lines = [f"check of {script}, {counted(report.replicas, 'replica')}, {counted(report.steps, 'step')}{cut}: {found}"]
    for finding in report.findings:
        where = [f"  where: {one_line(finding.where)}"] if finding.where else []
        lines += [one_line(finding.words), *where, f"  try:   {one_line(finding.remedy)}"]
    return "\n".join(lines)


def _json(script: Path, report: "Report", error: BaseException | None = None) -> str:
    """One line. Each finding, and the error that ended the app, has the code of its kind; "app" is an exception of the
    app. `epochs_cut` says that the app has seen less data than in a run."""
    record = {
        "script": str(script),
        "replicas": report.replicas,
        "steps": report.steps,
        "epochs_cut": report.epochs_cut,
        "findings": [asdict(finding) for finding in report.findings],
        "error": None if error is None else _error_fields(error),
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _error_fields(error: BaseException) -> dict[str, str | None]:
    from sambasim.samba.ending import translated

    error = translated(error)
    if isinstance(error, SambasimError):
        return {"code": error.code, "what": error.what, "where": error.where, "remedy": error.remedy}
    return {"code": "app", "what": f"{type(error).__name__}: {error}", "where": None, "remedy": None}
