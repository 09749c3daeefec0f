"""`sambasim env`: environment variables with which plain `python app.py` imports sambasim as sambaflow."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from sambasim.cli.app import PATH_ENTRY

STAND_INS = PATH_ENTRY.parent / "commands"
"""The folder of the replacements for srun, sbatch, snfadm and sntilestat."""


@click.command("env")
def env_command() -> None:
    """Print shell commands (sh, bash, zsh) with which launch scripts for the hardware work unchanged.

    They set PATH and PYTHONPATH: `import sambaflow` then imports sambasim, and srun, sbatch, snfadm and sntilestat run
    replacements of sambasim unless they are installed.

    \b
    Examples:
      eval "$(sambasim env)"
      mpirun -np 2 python app.py run --data-parallel --reduce-on-rdu --pef app.pef
    """
    for line in shell_lines(os.environ, Path(sys.executable).parent):
        print(line)
    if sys.stdout.isatty():
        print('nothing is set yet; to set it, type:  eval "$(sambasim env)"', file=sys.stderr)


def shell_lines(environ: Mapping[str, str], folder: Path) -> Iterator[str]:
    """The commands for a shell with the environment `environ`.

    folder: the folder of the Python that has sambasim. It goes to the front of PATH if another `python` or `mpirun`
        would be found first. The folder of the replacements goes to the end, behind installed commands.
    """
    path = environ.get("PATH", "")
    entries = [entry for entry in path.split(os.pathsep) if entry not in ("", str(STAND_INS))]
    found = {name: shutil.which(name, path=path) for name in ("python", "mpirun") if (folder / name).exists()}
    if any(where is None or Path(where).parent != folder for where in found.values()):
        entries = [str(folder), *(entry for entry in entries if entry != str(folder))]
    yield _export("PATH", [*entries, str(STAND_INS)])
    libraries = environ.get("PYTHONPATH", "").split(os.pathsep)
    yield _export(
        "PYTHONPATH", [str(PATH_ENTRY), *(entry for entry in libraries if entry not in ("", str(PATH_ENTRY)))]
    )


def _export(name: str, folders: Sequence[str]) -> str:
    return f"export {name}={shlex.quote(os.pathsep.join(folders))}"
