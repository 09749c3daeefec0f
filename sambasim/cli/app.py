"""`sambasim app`: run a script whose `import sambaflow` finds sambasim."""

import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import click

import sambasim

DOOR = Path(sambasim.__file__).parent / "samba" / "door" / "on_path"
"""The folder that opens the door to a process that has it on its path; found without importing what lies there."""


@click.command("app", context_settings={"allow_interspersed_args": False})
@click.argument("script", metavar="SCRIPT.py", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", metavar="ARGS...", nargs=-1, type=click.UNPROCESSED)
def app_command(script: Path, arguments: tuple[str, ...]) -> None:
    """Run a SambaFlow app as it is: what it imports from sambaflow is sambasim's.

    Everything behind SCRIPT.py is the script's own, its -h too. `python -m sambasim SCRIPT.py ...` is the same.

    \b
    Examples:
      sambasim app logreg.py compile --data-parallel -ws 2 --pef-name logreg
      mpirun -np 2 sambasim app logreg.py run --data-parallel --reduce-on-rdu --pef out/logreg/logreg.pef
      sambasim app logreg.py run -h
    """
    file = script.absolute()
    try:
        run_script(script, file, arguments)
    except SystemExit as error:
        code = _leave(error, file)
        # A text that the script left with is for Python to print.
        raise SystemExit(code if isinstance(error.code, int | None) else error.code) from None
    except BaseException as error:
        raise SystemExit(_leave(error, file)) from None


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
