"""A sambasim that is installed somewhere, called through its command line: two versions can be compared by it."""

import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.support.mpi import ROOT, job_environ

TIMEOUT_S = 1800.0
NO_ENV: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Installation:
    """`python` has `sambasim` and `mpirun` beside it; `checkout` has the sources, examples and configs."""

    python: Path
    checkout: Path

    def call(
        self,
        *command: str,
        folder: Path,
        np: int = 1,
        check: bool = True,
        env: Mapping[str, str] = NO_ENV,
        program: str = "sambasim",
    ) -> str:
        """Run `sambasim COMMAND` in `folder`, under mpirun if `np` is above 1; `env` is laid over its own. Returns
        its stdout. Raises RuntimeError with all that it printed if it fails, unless `check` is False."""
        argv, environ = self.argv(*command, np=np, program=program), {**self.environ(), **env}
        result = subprocess.run(
            argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(argv)}\nexit code {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result.stdout

    def argv(self, *command: str, np: int = 1, program: str = "sambasim") -> Sequence[str]:
        bin_folder = self.python.parent
        mpirun = [str(bin_folder / "mpirun"), "-np", str(np)] if np > 1 else []
        return [*mpirun, str(bin_folder / program), *command]

    def environ(self) -> dict[str, str]:
        """The environment of its processes."""
        env = {
            "PYTHONPATH": str(self.checkout),
            "PATH": f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "",  # start as a user's Python does, from byte code
        }
        return job_environ(uuid.uuid4().hex, env)


THIS = Installation(Path(sys.executable), ROOT)
