"""`sambasim app`: run a script whose `import sambaflow` finds sambasim."""

import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import click

import sambasim
from sambasim.cli.streams import survive_closed_stdout

PATH_ENTRY = Path(sambasim.__file__).parent / "samba" / "shim" / "path_entry"
"""The folder for `sys.path` that holds the `sambaflow` shim."""

STEPS = 16
"""Of a check, by default."""


@click.command("app", context_settings={"allow_interspersed_args": False})
@click.option("--check", is_flag=True, help="Run a few steps with every check, and report mistakes.")
@click.option("--check-steps", type=click.IntRange(min=1), metavar="N", help=f"Steps of a check; {STEPS} by default.")
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
            from sambasim.cli.check import check_script

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
    """Run a script as Python would, with the `sambaflow` shim. It stays `__main__`, for handlers at exit.

    script: its path on the command line, which becomes `sys.argv[0]`
    file: its absolute path, which becomes `__file__`
    """
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
    from sambasim.samba.shim.ending import leave

    return leave(error, script)
