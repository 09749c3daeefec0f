"""`sambasim env`: what a shell must know so that plain `python app.py` finds sambasim as sambaflow."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from sambasim.cli.app import DOOR


@click.command("env")
def env_command() -> None:
    """Print shell lines that let launch scripts for the hardware work as they are.

    After them, in this shell and what it starts, `import sambaflow` finds sambasim; for sh, bash, zsh.

    \b
    Examples:
      eval "$(sambasim env)"
      mpirun -np 2 python app.py run --data-parallel --reduce-on-rdu --pef app.pef
    """
    for line in shell_lines(os.environ, Path(sys.executable).parent):
        print(line)
    if sys.stdout.isatty():
        print('nothing is set yet; to set it:  eval "$(sambasim env)"', file=sys.stderr)


def shell_lines(environ: Mapping[str, str], folder: Path) -> Iterator[str]:
    """The lines, for a shell whose environment is `environ`.

    folder: where the Python lies that has sambasim. It goes to the front of PATH where another `python` or `mpirun`
        would be found first.
    """
    path = environ.get("PATH", "")
    found = {name: shutil.which(name, path=path) for name in ("python", "mpirun") if (folder / name).exists()}
    if any(where is None or Path(where).parent != folder for where in found.values()):
        yield _export("PATH", folder, path)
    yield _export("PYTHONPATH", DOOR, environ.get("PYTHONPATH", ""))


def _export(name: str, first: Path, value: str) -> str:
    """The line that puts `first` in front of a list of folders, and nowhere else into it."""
    others = [entry for entry in value.split(os.pathsep) if entry not in ("", str(first))]
    return f"export {name}={shlex.quote(os.pathsep.join([str(first), *others]))}"
