"""`sambasim env`: what a shell must know so that plain `python app.py` finds sambasim as sambaflow."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from sambasim.cli.app import DOOR

STAND_INS = DOOR.parent / "commands"
"""The folder of srun, sbatch, snfadm and sntilestat for a machine that has none."""


@click.command("env")
def env_command() -> None:
    """Print shell lines that let launch scripts for the hardware work as they are.

    After them, in this shell and what it starts, `import sambaflow` finds sambasim; for sh, bash, zsh. Where srun,
    sbatch, snfadm or sntilestat are not installed, stand-ins of sambasim are found instead.

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

    folder: the folder of the Python that has sambasim. It goes to the front of PATH where another `python` or `mpirun`
        would be found first. The stand-ins for srun and others go to its end, so that they hide none.
    """
    path = environ.get("PATH", "")
    entries = [entry for entry in path.split(os.pathsep) if entry not in ("", str(STAND_INS))]
    found = {name: shutil.which(name, path=path) for name in ("python", "mpirun") if (folder / name).exists()}
    if any(where is None or Path(where).parent != folder for where in found.values()):
        entries = [str(folder), *(entry for entry in entries if entry != str(folder))]
    yield _export("PATH", [*entries, str(STAND_INS)])
    libraries = environ.get("PYTHONPATH", "").split(os.pathsep)
    yield _export("PYTHONPATH", [str(DOOR), *(entry for entry in libraries if entry not in ("", str(DOOR)))])


def _export(name: str, folders: Sequence[str]) -> str:
    return f"export {name}={shlex.quote(os.pathsep.join(folders))}"
