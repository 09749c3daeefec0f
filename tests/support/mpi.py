"""Run a body under mpirun, and be sure that nothing of it is left when it ends, however it ends.

One body runs at several numbers of ranks, on data that depends on the rank, so that "multiply by size" cannot pass.
`SAMBASIM_TEST_RANKS` chooses the numbers: `make test-mpi-3` sets it to 3.
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from sambasim.records.metrics import SummaryRecord
from sambasim.runtime.machine.launcher import mpirun_here
from tests.support import warm
from tests.support.warm import JOB_KEY

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tests" / "support" / "site"
"""On PYTHONPATH, for what Python runs as it starts."""

SAMBASIM = [sys.executable, "-m", "sambasim"]
RANKS = tuple(int(ranks) for ranks in os.environ.get("SAMBASIM_TEST_RANKS", "1,2,3,4").split(","))

_SHARED_MEMORY = Path("/dev/shm")
_GOODBYE_S = 5.0
"""How long processes and segments of a job may outlive it."""
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PRTE_", "OMPI_", "MV2_", "SLURM_", "HYDI_", "MPI_")
_FOR_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""Without these it refuses root, and more ranks than cores; and ranks that wait take the cores from those that compute.
Other MPIs ignore them."""

_RULE = "-" * 74
_NOTICE = re.compile(rf"^{_RULE}\n.*?^{_RULE}\n\0?", re.DOTALL | re.MULTILINE)
"""What mpirun of Open MPI prints to stderr when a job has failed; ranks cannot prevent it."""


def body_command(name: str) -> list[str]:
    """The command that calls `main` of tests/mpi/bodies/NAME.py."""
    return [sys.executable, "-m", "tests.mpi.bodies.start", name]


@dataclass(frozen=True, slots=True)
class Result:
    """What a job left: its exit code, what its ranks printed, and how long it took from start to end."""

    returncode: int
    stdout: str
    stderr: str
    elapsed_s: float

    def check(self) -> "Result":
        """This result. Fails the test with everything that was printed unless the exit code is 0."""
        if self.returncode != 0:
            pytest.fail(f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}")
        return self

    @property
    def summary(self) -> SummaryRecord:
        """All that a run with --json printed, which must have ended well."""
        (line,) = self.check().stdout.splitlines()
        return SummaryRecord.model_validate_json(line)


def mpirun() -> str:
    """The mpirun beside the running Python, else the one on PATH. Fails the test if there is none."""
    found = mpirun_here()
    if found is None:
        pytest.fail("there is no mpirun: python -m pip install mpich")
    return found


@functools.cache
def library() -> str:
    """Name and version of the MPI that jobs of these tests run on, such as `MPICH 5.0.2`; asked in another process."""
    body = "from sambasim.runtime.machine.mpi import linked_library; print(linked_library())"
    return run_job([sys.executable, "-c", body]).check().stdout.strip()


def codes_of_signalled(number: int) -> set[int]:
    """Exit codes of an mpirun that passes a signal on to ranks, which end by it. MPICH 3.4.3's now and then is 0."""
    return {128 + number, 0} if library().startswith("MPICH 3.") else {128 + number}


def is_open_mpi() -> bool:
    return library().startswith("Open MPI")


def run_mpi(
    np: int,
    argv: Sequence[str],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    hosts: int = 1,
) -> Result:
    """Run `mpirun -np NP ARGV`; `env` is laid over this process's environment, with one thread a rank unless it says.
    With several `hosts`, which divide NP, this machine plays each of them, if it may give processes other host names.
    Fails the test if the job does not end within `timeout` seconds, or leaves a process or shared memory behind."""
    played = _playing(hosts, np // hosts) if hosts > 1 else []
    command = [mpirun(), *played, "-np", str(np), *argv]
    return run_job(command, timeout=timeout, env=env, cwd=cwd, is_fresh=bool(played))


@functools.cache
def can_play_hosts() -> bool:
    """Whether this process may give others a host name and a /dev/shm of their own."""
    return shutil.which("unshare") is not None and (
        subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode == 0
    )


def _playing(hosts: int, ranks: int) -> list[str]:
    """Flags of mpirun for `ranks` ranks on each of the hosts that this machine plays."""
    agent = str(ROOT / "tests" / "support" / "play_host")
    names = [f"played-{index}" for index in range(hosts)]
    if is_open_mpi():
        # As a list of --host they would be one: they have the same addresses.
        hostfile = Path(tempfile.gettempdir(), f"sambasim-test-hosts-{hosts}-{ranks}")
        hostfile.write_text("".join(f"{name} slots={ranks}\n" for name in names))
        settings = {"prte_default_hostfile": str(hostfile), "plm_ssh_agent": agent}
        flags = [word for name, value in settings.items() for word in ("--prtemca", name, value)]
        return [*flags, "--map-by", f"ppr:{ranks}:node:oversubscribe"]
    return ["-hosts", ",".join(names), "-ppn", str(ranks), "-launcher-exec", agent]


def run_job(
    command: Sequence[str],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    is_fresh: bool = False,
) -> Result:
    """As `run_mpi`, for a command line that starts with something else. `is_fresh`: its processes import all anew."""
    job = uuid.uuid4().hex
    environ = job_environ(job, env)
    names_before = segment_names()
    start = time.monotonic()
    process = subprocess.Popen(
        command if is_fresh else warm.command(command, environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        cwd=cwd or ROOT,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = _kill(process, job)
        pytest.fail(f"the job did not end within {timeout} s\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    except BaseException:  # of pytest-timeout, or Ctrl-C: the job must not outlive the test
        _kill(process, job)
        raise
    elapsed_s = time.monotonic() - start
    check_nothing_left(job, names_before)
    return Result(process.returncode, stdout, _NOTICE.sub("", stderr), elapsed_s)


def job_environ(job: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job that is called `job`, on whichever MPI; `env` is laid over it."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_PREFIXES)}
    return {
        **inherited,
        **_FOR_OPEN_MPI,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SITE}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **(env or {}),
        JOB_KEY: job,
    }


def _kill(process: "subprocess.Popen[str]", job: str) -> tuple[str, str]:
    """End the job: mpirun first, which takes its ranks along, then whatever of the job is still there."""
    os.killpg(process.pid, signal.SIGTERM)
    for pid in _lasting(lambda: processes_of(job)):
        _kill_process(pid)
    return process.communicate(timeout=_GOODBYE_S)


def check_nothing_left(job: str, names_before: frozenset[str]) -> None:
    left = _lasting(lambda: processes_of(job))
    for pid in left:
        _kill_process(pid)
    if left:
        pytest.fail(f"the job left processes behind: {left}")
    # Those of other jobs are mapped, but for moments.
    if forgotten := _lasting(lambda: [name for name in segment_names() - names_before if not _is_mapped(name)]):
        pytest.fail(f"the job left shared memory behind: {sorted(forgotten)}")


def _lasting(left: Callable[[], list[T]]) -> list[T]:
    """What is still `left` after a grace period."""
    until = time.monotonic() + _GOODBYE_S
    while (found := left()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def processes_of(job: str) -> list[int]:
    """The process ids of the job whose environment says that it is `job`."""
    mark = f"{JOB_KEY}={job}".encode()
    return [pid for pid in _process_ids() if mark in _read(Path(f"/proc/{pid}/environ")).split(b"\0")]


def _is_mapped(name: str) -> bool:
    path = str(_SHARED_MEMORY / name).encode()
    return any(path in _read(Path(f"/proc/{pid}/maps")) for pid in _process_ids())


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _read(path: Path) -> bytes:
    """The content of a file of /proc; nothing if its process is gone or another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def segment_names() -> frozenset[str]:
    return frozenset(entry.name for entry in _SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.is_dir() else frozenset()
