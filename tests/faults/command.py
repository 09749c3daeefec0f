"""`sambasim` as typed, in this process, which saves the start of Python and torch."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sambasim.cli.main import main
from tests.support.mpi import Result

_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MV2_", "SLURM_", "HYDI_", "MPI_")


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str


def outcome_of(result: Result) -> Outcome:
    return Outcome(result.returncode, result.stdout, result.stderr)


def sambasim(arguments: Sequence[str], folder: Path) -> Outcome:
    """The outcome of `sambasim ARGUMENTS`, typed in `folder`; this process is as before.

    What escapes `main` other than SystemExit escapes here too: a user would see a traceback.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with _as_typed(arguments, folder), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return Outcome(code if isinstance(code, int) else int(code is not None), stdout.getvalue(), stderr.getvalue())


@contextlib.contextmanager
def _as_typed(arguments: Sequence[str], folder: Path) -> Iterator[None]:
    # Modules of the user's files stay loaded, as tracers keep their names; those of another folder get another name.
    state = os.getcwd(), sys.argv, [*sys.path], dict(os.environ), sys.dont_write_bytecode, torch.get_num_threads()
    os.chdir(folder)
    sys.argv = ["sambasim", *arguments]
    sys.dont_write_bytecode = True
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        cwd, sys.argv, sys.path[:], environ, sys.dont_write_bytecode, threads = state
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(threads)
