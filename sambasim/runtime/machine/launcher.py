"""Which launcher started this process, with how many ranks, and whether they fit the MPI and the PEF.

If mpirun belongs to another MPI than the one mpi4py is linked to, MPI reports no error: each of N processes is a job of
one rank, and all write the same files. The launcher's environment variables show it. torchrun connects its processes by
torch.distributed, and not by MPI: on one node, the first of them becomes mpirun.
"""

import os
import re
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sambasim.errors import LaunchError
from sambasim.units import counted

if TYPE_CHECKING:
    from sambasim.ir.mesh import Mesh


class Launcher(NamedTuple):
    """What started this process, by its environment."""

    name: str
    world_size: int
    rank: int

    @property
    def is_open_mpi(self) -> bool:
        """Then ranks continue when mpirun is killed, and their standard output is always a terminal."""
        return self.name == _OPEN_MPI

    @property
    def wait_for_report_s(self) -> float:
        """How long a failed rank waits for rank 0's report (estimate): some launchers end all ranks at one exit."""
        return 2.0 if self.rank > 0 and (self.is_open_mpi or pmi_socket() is not None) else 0.0

    def end_job(self, exit_code: int) -> None:
        """End the job that this process has not joined by MPI: Hydra would let the others wait for it in MPI_Init."""
        if self.world_size > 1 and (pmi := pmi_socket()) is not None:
            time.sleep(FORWARDING_S)
            with suppress(OSError):
                os.write(pmi, f"cmd=abort exitcode={exit_code}\n".encode())  # of PMI-1


FORWARDING_S = 0.3
"""For the launcher to forward an error: some drop unread output when a job aborts."""
_OPEN_MPI, _SRUN, _TORCHRUN = "mpirun of Open MPI", "srun", "torchrun"
_LAUNCHERS = (
    (_OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ()),
    ("mpirun of MPICH or its relatives", "PMI_SIZE", "PMI_RANK", ()),  # also Intel MPI, and srun
    (_TORCHRUN, "WORLD_SIZE", "RANK", ("TORCHELASTIC_RUN_ID",)),
    # A batch script has SLURM_NTASKS too; only what srun started belongs to a step with tasks.
    (_SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", ("SLURM_STEP_ID", "SLURM_PROCID")),
)
"""Name, variables with the number of ranks and the rank, and what must be there too. Earlier rows take precedence:
under Slurm, MPICH's mpirun starts helpers with srun, whose step counts nodes, not ranks."""


def pmi_socket() -> int | None:
    """The file descriptor by which Hydra, MPICH's mpirun, serves this process, and not its children."""
    descriptor = _number(os.environ, "PMI_FD")
    with suppress(OSError):
        return descriptor if descriptor and stat.S_ISSOCK(os.fstat(descriptor).st_mode) else None
    return None


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher of this process, or None if it was started by hand."""
    for name, size_key, rank_key, others in _LAUNCHERS:
        if (size := _number(environ, size_key)) is not None and all(key in environ for key in others):
            return Launcher(name, size, _number(environ, rank_key) or 0)
    return None


def check_alone(environ: Mapping[str, str], command: Sequence[str]) -> None:
    """Raise LaunchError if a process without a launcher is one of several by RANK and WORLD_SIZE: of a script or a
    cluster for torch.distributed, by which MPI does not connect them."""
    ranks, rank, typed = _number(environ, "WORLD_SIZE") or 1, environ.get("RANK", ""), shlex.join(command)
    if find_launcher(environ) is None and rank and ranks > 1:
        what = f"RANK={rank} and WORLD_SIZE={ranks} are set, and no mpirun connects the {ranks} processes"
        alone = f"for one process alone: env -u RANK -u WORLD_SIZE {typed}"
        raise LaunchError(f"{what}: each would train alone", remedy=f"mpirun -np {ranks} {typed}; or {alone}")


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    launcher = find_launcher(environ)
    return 0 if launcher is None else launcher.rank


def ranks_of_node(environ: Mapping[str, str]) -> int:
    """How many ranks the launcher started on this node; 1 if unknown."""
    sizes = (_number(environ, key) for key in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"))
    return next((size for size in sizes if size is not None), 1)


def library_name(version: str) -> str:
    """The result of `MPI_Get_library_version` in short: `MPICH 5.0.2`, `Open MPI 5.0.8`."""
    lines = version.strip("\0 \n").splitlines() or ["an unknown MPI"]
    words = lines[0].split(",")[0].replace("Version:", "").split()
    return " ".join(word[1:] if word[0] == "v" and word[1:2].isdigit() else word for word in words)


def check_compiles_alone() -> None:
    """Raises LaunchError if this process, which is to compile, is one of several ranks."""
    launcher = find_launcher()
    if launcher and launcher.world_size > 1:
        what = f"{launcher.name} started {launcher.world_size} ranks, but a PEF is compiled by one process"
        raise LaunchError(what, remedy="compile without mpirun; -ws says the smallest number of replicas")


def mpirun_instead(environ: Mapping[str, str], executable: Path, arguments: Sequence[str]) -> list[str] | None:
    """The command that must replace this process if torchrun started several: mpirun with `arguments` in the first,
    nothing in the others; None otherwise. Raises LaunchError for several nodes, and without an mpirun."""
    launcher = find_launcher(environ)
    if launcher is None or launcher.name != _TORCHRUN or launcher.world_size == 1:
        return None
    ranks, typed = str(launcher.world_size), shlex.join(["sambasim", *arguments])
    if _number(environ, "LOCAL_WORLD_SIZE") != launcher.world_size:
        what = f"torchrun started {ranks} processes on several nodes, and MPI does not connect them"
        raise LaunchError(what, remedy=f"on the first node: mpirun -np {ranks} -hosts NODE,NODE {typed}")
    if (mpirun := mpirun_here(executable)) is None:
        what = f"torchrun started {ranks} processes, which MPI would have to connect, and there is no mpirun"
        raise LaunchError(what, remedy=f"python -m pip install mpich; mpirun -np {ranks} {typed}")
    return [mpirun, "-np", ranks, str(executable), "-m", "sambasim", *arguments] if launcher.rank == 0 else []


def cores_of_this_process() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def mpirun_here(executable: Path = Path(sys.executable)) -> str | None:
    """The mpirun beside the Python `executable`, or in the PATH."""
    beside = executable.parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def fitting_mpirun(executable: Path, library: str) -> str:
    """The command of the mpirun that belongs to `library`: an MPI from a wheel is beside the Python `executable`."""
    beside = executable.parent / "mpirun"
    return shlex.quote(str(beside)) if beside.exists() else f"mpirun (of {library})"


def check_launcher(
    environ: Mapping[str, str], world_size: int | None, version: str, *, command: Sequence[str], executable: Path
) -> None:
    """Raise LaunchError if the launcher started another number of ranks than MPI sees; with None for that, before MPI
    starts, if the MPI would end the process. `version`: of the library; `command`: what was typed, without mpirun."""
    launcher, library = find_launcher(environ), library_name(version)
    if launcher is None or launcher.world_size == (1 if launcher.name == _TORCHRUN else world_size):
        return
    but, typed = f"{library} sees {world_size}", f"{launcher.world_size} {shlex.join(command)}"
    remedy = f"{fitting_mpirun(executable, library)} -np {typed}"
    if launcher.name == _TORCHRUN:
        started = f"torchrun started {launcher.world_size} processes"
        raise LaunchError(f"{started}, and MPI does not connect them: every replica would train alone", remedy=remedy)
    if world_size is None:
        if launcher.name != _OPEN_MPI or not library.startswith(("MPICH", "Intel")):
            return
        but = f"{library} cannot be started by it"
    if launcher.name == _SRUN:
        # Open MPI 5 has PMIx only; the MPICH of the wheels has PMI-1 and PMI-2.
        interface = "pmix" if library.startswith("Open MPI") else "pmi2"
        remedy = f"srun --mpi={interface} -n {typed}   (srun --mpi=list shows what it supports)"
    started = f"{launcher.name} started {counted(launcher.world_size, 'rank')}, but {but}"
    why = "mpi4py is linked to another MPI than the launcher's, and every replica would train alone"
    raise LaunchError(f"{started}: {why}", remedy=remedy)


WHOLE_REPLICAS = "--one-process-per-replica"


def ranks_of_process(processes: int, replica: int, emulated: int | None, *, whole: bool) -> int:
    """How many of the `replica` ranks of a replica, or all of `emulated` ones, each of `processes` runs."""
    return (emulated or 1) * (replica if whole or processes == 1 else 1)


def replicas_of(processes: int, replica: "Mesh", minimum: int, *, command: Sequence[str], whole: bool = False) -> int:
    """How many replicas `processes` run; one without others has all ranks of a replica. Raises LaunchError if that is
    no whole number. `minimum`: as in `check_world_size`."""
    if whole or processes == 1:
        return processes
    replicas, left = divmod(processes, replica.world_size)
    if left or replicas == 0:
        what = f"{processes} ranks were started, and a replica of this PEF has {replica.world_size} ({replica})"
        fitting = f"mpirun -np {max(replicas, minimum) * replica.world_size} {shlex.join(command)}"
        raise LaunchError(what, remedy=fitting + _or_whole(processes, replica, minimum, command))
    return replicas


def _or_whole(processes: int, replica: "Mesh | None", minimum: int, command: Sequence[str]) -> str:
    """The command by which `processes` are as many replicas, if the PEF was compiled for that, to append to another."""
    from sambasim.ir.mesh import DATA_PARALLEL

    if replica is None or replica.world_size == 1 or replica.size(DATA_PARALLEL) > 1 or not 1 < minimum <= processes:
        return ""
    return f"; or for {processes} replicas: mpirun -np {processes} {shlex.join(command)} {WHOLE_REPLICAS}"


def check_world_size(
    world_size: int,
    minimum: int,
    *,
    command: Sequence[str],
    data_parallel: bool,
    emulated: bool = False,
    replica: "Mesh | None" = None,
    processes: int = 1,
) -> None:
    """Raise LaunchError if a PEF cannot run with `world_size` replicas. `minimum`: the number that it was compiled for;
    `replica`: the mesh of one, if each of its ranks should be a process; `processes`: how many were started then."""
    ranks_of_replica = 1 if replica is None else replica.world_size
    if world_size < minimum:
        of_one = "" if emulated or ranks_of_replica == 1 else f" of {ranks_of_replica} ranks"
        compiled = f"this PEF was compiled for at least {minimum} replicas{of_one} (-ws {minimum})"
        remedy = f"mpirun -np {minimum * ranks_of_replica} {shlex.join(command)}"
        remedy += _or_whole(processes, replica, minimum, command)
        if emulated:
            remedy = _emulating(command, minimum)
        raise LaunchError(f"{compiled}, and {_started(world_size, emulated, 'replica')}", remedy=remedy)
    if world_size > 1 and not data_parallel:
        started = _started(world_size if emulated else world_size * ranks_of_replica, emulated, "rank")
        left = [word for word in command if word.replace("_", "-") not in ("--data-parallel", "--reduce-on-rdu")]
        alone = f"{f'mpirun -np {ranks_of_replica} ' if ranks_of_replica > 1 else ''}{_emulating(left, None)}"
        what = f"{started}, but this PEF has no REDUCE and GATHER sections between replicas: they would train apart"
        remedy = f"compile it with --data-parallel -ws {world_size}, or run one replica: {alone}"
        raise LaunchError(what, remedy=remedy)


def check_emulation(world_size: int, emulated: int, *, command: Sequence[str]) -> None:
    if world_size > 1 and emulated > 1:
        plays = f"--emulate-replicas {emulated} plays all replicas in one process"
        what = f"{plays}, and {world_size} processes were started"
        raise LaunchError(what, remedy=f"without mpirun: {shlex.join(command)}")


def _emulating(command: Sequence[str], replicas: int | None) -> str:
    """The command with another number after --emulate-replicas, or without it."""
    without = re.sub(r" --emulate[-_]replicas[= ]\S+", "", shlex.join(command))
    return without if replicas is None else f"{without} --emulate-replicas {replicas}"


def _started(number: int, emulated: bool, what: str) -> str:
    if emulated:
        return f"--emulate-replicas {number} was given"
    return f"{counted(number, what)} {'was' if number == 1 else 'were'} started"


def _number(environ: Mapping[str, str], key: str) -> int | None:
    text = environ.get(key, "")
    return int(text) if text.isdecimal() else None
