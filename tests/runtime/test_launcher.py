"""Launchers found in environments, and launches refused before any work."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import LaunchError
from sambasim.ir.mesh import Mesh
from sambasim.runtime.machine.launcher import (
    Launcher,
    check_alone,
    check_emulation,
    check_launcher,
    check_world_size,
    find_launcher,
    fitting_mpirun,
    launched_rank,
    library_name,
    mpirun_instead,
    ranks_of_node,
    replicas_of,
)
from sambasim.terminal.output import report_error

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ...\n"
OPEN_MPI = "Open MPI v5.0.8, package: Open MPI conda@host Distribution, ident: 5.0.8"
COMMAND, TYPED = ("sambasim", "run", "--pef", "my model.pef"), "sambasim run --pef 'my model.pef'"
NOWHERE = Path("/nowhere/bin/python")

BY_MPICH, BY_SRUN, BY_TORCHRUN = "mpirun of MPICH or its relatives", "srun", "torchrun"
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, ("mpirun of Open MPI", 4, 3)),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, (BY_MPICH, 3, 2)),
        ({"PMI_SIZE": "3"}, (BY_MPICH, 3, 0)),
        ({"PMI_SIZE": ""}, None),
        (SRUN, (BY_SRUN, 2, 1)),
        # A batch script, and a shell from salloc, know how many tasks may run, but srun did not start them.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, None),
        (TORCHRUN | {"RANK": "1"}, (BY_TORCHRUN, 2, 1)),
        ({"WORLD_SIZE": "2", "RANK": "1"}, None),  # a cluster gives them to every process
        # Below the mpirun that takes the place of the first process of torchrun.
        (TORCHRUN | {"PMI_SIZE": "2", "PMI_RANK": "1"}, (BY_MPICH, 2, 1)),
        # MPICH's mpirun on two nodes: its helpers are a step of two tasks, its ranks are eight.
        (SRUN | {"PMI_SIZE": "8", "PMI_RANK": "5"}, (BY_MPICH, 8, 5)),
    ],
)
def test_the_launcher_is_found(environ: dict[str, str], launcher: tuple[str, int, int] | None) -> None:
    assert find_launcher(environ) == (Launcher(*launcher) if launcher else None)
    assert launched_rank(environ) == (launcher[2] if launcher else 0)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        *((MPICH, "MPICH 5.0.2"), (OPEN_MPI, "Open MPI 5.0.8"), ("\0", "an unknown MPI")),
        ("Intel(R) MPI Library 2021.15 for Linux* OS\n\0", "Intel(R) MPI Library 2021.15 for Linux* OS"),
    ],
)
def test_a_library_is_named_in_a_few_words(version: str, name: str) -> None:
    assert library_name(version) == name


def refusal(check: Callable[..., object], *args: object, **keywords: object) -> LaunchError:
    with pytest.raises(LaunchError) as error:
        check(*args, **keywords)
    return error.value


def of_launcher(environ: dict[str, str], seen: int | None, version: str, python: Path = NOWHERE) -> LaunchError:
    return refusal(check_launcher, environ, seen, version, command=COMMAND, executable=python)


def test_the_remedy_is_the_mpirun_beside_python(tmp_path: Path) -> None:
    (tmp_path / "mpirun").touch()
    error = of_launcher({"OMPI_COMM_WORLD_SIZE": "3"}, 1, MPICH, tmp_path / "python")
    assert error.remedy == f"{tmp_path}/mpirun -np 3 sambasim run --pef 'my model.pef'"
    assert fitting_mpirun(tmp_path / "python", "MPICH 5.0.2") == f"{tmp_path}/mpirun"
    assert fitting_mpirun(NOWHERE, "MPICH 5.0.2") == "mpirun (of MPICH 5.0.2)"


@pytest.mark.parametrize(("version", "interface"), [(MPICH, "pmi2"), (OPEN_MPI, "pmix")])
def test_srun_is_told_the_interface_to_speak(version: str, interface: str) -> None:
    error = str(of_launcher(SRUN, 1, version))
    assert error.startswith(f"srun started 2 ranks, but {library_name(version)} sees 1: ")
    assert f"\n  try:   srun --mpi={interface} -n 2 sambasim run --pef 'my model.pef'" in error


EMULATED = {"emulated": True, "command": ["sambasim", "run", "--emulate-replicas", "3", "--pef", "net"]}
OTHERWISE = {"emulated": True, "command": ["sambasim", "run", "--emulate_replicas=3", "--pef", "net"]}
MESH = {"command": COMMAND[:2], "replica": Mesh({"pp": 2, "tp": 2})}
AT_LEAST, FOUR = "this PEF was compiled for at least", "sambasim run --pef net --emulate-replicas 4"
OF_MESH = f"{AT_LEAST} 2 replicas of 4 ranks (-ws 2), and 1 replica was started > mpirun -np 8 sambasim run"
WHOLE = "; or for 4 replicas: mpirun -np 4 sambasim run --one-process-per-replica"
APART = (
    "--emulate-replicas 3 was given, but this PEF has no REDUCE and GATHER sections between replicas: they would train "
    "apart > compile it with --data-parallel -ws 3, or run one replica: sambasim run --pef net"
)


@pytest.mark.parametrize(
    ("world_size", "minimum", "asked", "message"),
    [
        (1, 2, {}, f"{AT_LEAST} 2 replicas (-ws 2), and 1 replica was started > mpirun -np 2 {TYPED}"),
        (3, 4, {}, f"{AT_LEAST} 4 replicas (-ws 4), and 3 replicas were started > mpirun -np 4 {TYPED}"),
        (3, 4, EMULATED, f"{AT_LEAST} 4 replicas (-ws 4), and --emulate-replicas 3 was given > {FOUR}"),
        (3, 4, OTHERWISE, f"{AT_LEAST} 4 replicas (-ws 4), and --emulate-replicas 3 was given > {FOUR}"),
        (3, 1, EMULATED | {"data_parallel": False}, APART),
        (1, 2, MESH, OF_MESH),
        # Processes may be replicas only if as many were started.
        (1, 2, MESH | {"processes": 4}, OF_MESH + WHOLE),
    ],
)
def test_a_wrong_number_of_replicas_is_refused_with_the_right_command(
    world_size: int, minimum: int, asked: dict[str, Any], message: str
) -> None:
    error = refusal(check_world_size, world_size, minimum, **{"command": COMMAND, "data_parallel": True, **asked})
    assert f"{error.what} > {error.remedy}" == message


@pytest.mark.parametrize(
    ("minimum", "replica", "remedy"),
    [
        (2, {"pp": 1, "tp": 2}, "mpirun -np 4 {}; or for 3 replicas: mpirun -np 3 {} --one-process-per-replica"),
        (3, {"pp": 4}, "mpirun -np 12 {}; or for 3 replicas: mpirun -np 3 {} --one-process-per-replica"),
        (4, {"pp": 4}, "mpirun -np 16 {}"),
        (1, {"pp": 4}, "mpirun -np 4 {}"),  # perhaps without data parallelism
        (2, {"dp": 2}, "mpirun -np 4 {}"),  # chips
    ],
)
def test_ranks_that_are_no_whole_replicas_are_refused(minimum: int, replica: dict[str, int], remedy: str) -> None:
    mesh = Mesh(replica)
    error = refusal(replicas_of, 3, mesh, minimum, command=COMMAND)
    assert error.what == f"3 ranks were started, and a replica of this PEF has {mesh.world_size} ({mesh})"
    assert error.remedy == remedy.replace("{}", TYPED)
    assert replicas_of(3, mesh, minimum, command=COMMAND, whole=True) == 3


def test_several_ranks_emulate_nothing() -> None:
    error = refusal(check_emulation, 2, 3, command=COMMAND)
    assert "plays all replicas in one process, and 2 processes were started" in error.what
    assert error.remedy == f"without mpirun: {TYPED}"
    check_emulation(1, 3, command=COMMAND)
    check_emulation(2, 1, command=COMMAND)


def test_the_launcher_says_how_many_ranks_share_this_node() -> None:
    assert ranks_of_node({}) == 1
    assert ranks_of_node({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 2
    assert ranks_of_node({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "3"}) == 3


def test_the_first_process_of_torchrun_becomes_mpirun(tmp_path: Path) -> None:
    python, words = tmp_path / "python", ["run", "--pef", "my model"]
    (tmp_path / "mpirun").touch()
    instead = [str(tmp_path / "mpirun"), "-np", "2", str(python), "-m", "sambasim", *words]
    assert mpirun_instead(TORCHRUN, python, words) == instead
    assert mpirun_instead(TORCHRUN | {"RANK": "1"}, python, words) == []
    for other in ({}, {"PMI_SIZE": "2"}, TORCHRUN | {"WORLD_SIZE": "1"}, TORCHRUN | {"PMI_SIZE": "2"}):
        assert mpirun_instead(other, python, words) is None


def test_torchrun_without_mpirun_or_on_several_nodes_is_told_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    error = refusal(mpirun_instead, TORCHRUN, NOWHERE, COMMAND[1:])
    assert error.what == "torchrun started 2 processes, which MPI would have to connect, and there is no mpirun"
    assert error.remedy == f"python -m pip install mpich; mpirun -np 2 {TYPED}"
    error = refusal(mpirun_instead, TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, NOWHERE, COMMAND[1:])
    assert "2 processes on several nodes" in error.what
    assert f"mpirun -np 2 -hosts NODE,NODE {TYPED}" in str(error.remedy)


def test_scripts_and_apps_under_torchrun_are_told_of_mpirun() -> None:
    error = of_launcher(TORCHRUN, None, MPICH)
    assert "MPI does not connect them" in error.what
    assert error.remedy == f"mpirun (of MPICH 5.0.2) -np 2 {TYPED}"
    for world_size in (None, 1):
        check_launcher(TORCHRUN | {"WORLD_SIZE": "1"}, world_size, MPICH, command=COMMAND, executable=NOWHERE)


def test_processes_that_nothing_connects_are_refused() -> None:
    several = {"RANK": "1", "WORLD_SIZE": "2"}
    error = refusal(check_alone, several, COMMAND)
    assert error.what.startswith("RANK=1 and WORLD_SIZE=2 are set, and no mpirun connects the 2 processes")
    assert error.remedy == f"mpirun -np 2 {TYPED}; or for one process alone: env -u RANK -u WORLD_SIZE {TYPED}"
    for environ in ({}, {"RANK": "0"}, {"WORLD_SIZE": "2"}, several | {"WORLD_SIZE": "1"}, several | {"PMI_SIZE": "1"}):
        check_alone(environ, COMMAND)


@pytest.mark.parametrize(("rank", "who"), [(0, ""), (1, f" (rank 1 on {socket.gethostname()})")])
def test_an_error_before_mpi_ends_the_job(
    rank: int, who: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra would let the other ranks wait in MPI_Init."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    mpirun, served = socket.socketpair()
    with mpirun, served:
        for key, value in {"PMI_SIZE": 2, "PMI_RANK": rank, "PMI_FD": served.fileno()}.items():
            monkeypatch.setenv(key, str(value))
        report_error(LaunchError("one rank fails"))
        assert mpirun.recv(100) == b"cmd=abort exitcode=2\n"
    assert capsys.readouterr().err.startswith(f"error[launch]{who}: one rank fails")
    assert sum(waited) > rank  # for an error of all ranks, which rank 0 reports


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_before_mpi_ends_the_job(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun, served = socket.socketpair()
    with mpirun, served:
        for key, value in {"PMI_SIZE": 2, "PMI_RANK": rank, "PMI_FD": served.fileno()}.items():
            monkeypatch.setenv(key, str(value))
        report_error(KeyboardInterrupt())
        assert mpirun.recv(100) == b"cmd=abort exitcode=130\n"
