"""`sambasim app`: run a script whose `import sambaflow` finds sambasim."""

import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import click

import sambasim
from sambasim.cli.streams import outlive_readers

DOOR = Path(sambasim.__file__).parent / "samba" / "door" / "on_path"
"""The folder that opens the door to a process that has it on its path; found without importing what lies there."""

STEPS = 16
"""Of a check, unless it is said."""


@click.command("app", context_settings={"allow_interspersed_args": False})
@click.option("--check", is_flag=True, help="Run a few steps with every check, and report what replicas do wrong.")
@click.option(
    "--check-steps", type=click.IntRange(min=1), metavar="N", help=f"Steps of a check; {STEPS} if it is not said."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report of a check as one JSON line.")
@click.argument("script", metavar="SCRIPT.py", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", metavar="ARGS...", nargs=-1, type=click.UNPROCESSED)
def app_command(script: Path, arguments: tuple[str, ...], check: bool, check_steps: int | None, as_json: bool) -> None:
    """Run a SambaFlow app as it is: what it imports from sambaflow is sambasim's.

    Everything behind SCRIPT.py is the script's own, its -h too. `python -m sambasim SCRIPT.py ...` is the same.

    With --check the script runs until its replicas have taken N steps, in epochs of half as many, and is left there.
    The exit code is 0 if nothing was found, 1 if something was, and another if the check could not go on.

    \b
    Examples:
      sambasim app logreg.py compile --data-parallel -ws 2 --pef-name logreg
      mpirun -np 2 sambasim app logreg.py run --data-parallel --reduce-on-rdu --pef out/logreg/logreg.pef
      mpirun -np 2 sambasim app --check logreg.py run --data-parallel --pef out/logreg/logreg.pef
      sambasim app logreg.py run -h
    """
    if as_json and not check:
        raise click.UsageError("--json is for the report of a --check; what the script prints is its own")
    if check_steps is not None and not check:
        raise click.UsageError("--check-steps is for a --check; how long the script runs is its own")
    outlive_readers()
    file, code = script.absolute(), 0
    try:
        if check:
            from sambasim.cli.check import check_script

            code = check_script(script, file, arguments, steps=check_steps or STEPS, as_json=as_json)
        else:
            run_script(script, file, arguments)
    except SystemExit as error:
        code = _leave(error, file)
        # A text that the script left with is for Python to print.
        raise SystemExit(code if isinstance(error.code, int | None) else error.code) from None
    except BaseException as error:
        raise SystemExit(_leave(error, file)) from None
    raise SystemExit(code)


def run_script(script: Path, file: Path, arguments: Sequence[str]) -> None:
    """Run a script as Python would, with the door open. It stays `__main__`, for what happens at exit.

    script: its path as it was typed, which becomes `sys.argv[0]`
    file: the same, absolute: its `__file__`
    """
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(file.resolve().parent)
    if str(DOOR) not in sys.path:
        sys.path.insert(1, str(DOOR))
    # Not by runpy.run_path: it makes `sys.argv[0]` and `__file__` one text, and forgets the module at the end.
    loader = SourceFileLoader("__main__", str(file))
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = str(file), loader
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(str(file)), str(file)), module.__dict__)


def _leave(error: BaseException, script: Path) -> int:
    from sambasim.samba.door.ending import leave

    return leave(error, script)
