"""`sambasim` as typed, in this process, which saves the start of Python and torch."""

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from sambasim.cli.main import main
from tests.support.mpi import Result

_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MV2_", "SLURM_", "HYDI_", "MPI_")


def sambasim(arguments: Sequence[str] | str, folder: Path) -> Result:
    """The result of `sambasim ARGUMENTS`, typed in `folder`; this process is as before.

    What escapes `main` other than SystemExit escapes here too: a user would see a traceback.
    """
    words = shlex.split(arguments) if isinstance(arguments, str) else arguments
    stdout, stderr, began_s = io.StringIO(), io.StringIO(), time.monotonic()
    with _as_typed(words, folder), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main()
        except SystemExit as end:
            code = end.code
    returncode = code if isinstance(code, int) else int(code is not None)
    return Result(returncode, stdout.getvalue(), stderr.getvalue(), time.monotonic() - began_s)


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
