"""Launchers found in environments, and launches refused before any work."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import LaunchError
from sambasim.ir.mesh import Mesh
from sambasim.runtime.machine.launcher import (
    Launcher,
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

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ...\n"
OPEN_MPI = "Open MPI v5.0.8, package: Open MPI conda@host Distribution, ident: 5.0.8"
COMMAND = ("sambasim", "run", "--pef", "my model.pef")
NOWHERE = Path("/nowhere/bin/python")

ENVIRONMENTS = [
    ({}, None),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, ("mpirun of Open MPI", 4, 3)),
    ({"PMI_SIZE": "3", "PMI_RANK": "2"}, ("mpirun of MPICH or its relatives", 3, 2)),
    ({"PMI_SIZE": "3"}, ("mpirun of MPICH or its relatives", 3, 0)),
    ({"PMI_SIZE": ""}, None),
    ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ("srun", 2, 1)),
    # A batch script, and a shell from salloc, know how many tasks may run, but srun did not start them.
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),
    ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, None),
    ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}, ("torchrun", 2, 1)),
    ({"WORLD_SIZE": "2", "RANK": "1"}, None),  # a cluster gives them to every process
    # Below the mpirun that takes the place of the first process of torchrun.
    (
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0", "PMI_SIZE": "2", "PMI_RANK": "1"},
        ("mpirun of MPICH or its relatives", 2, 1),
    ),
    # MPICH's mpirun on two nodes: its helpers are a step of two tasks, its ranks are eight.
    (
        {"PMI_SIZE": "8", "PMI_RANK": "5", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        ("mpirun of MPICH or its relatives", 8, 5),
    ),
]


@pytest.mark.parametrize(("environ", "launcher"), ENVIRONMENTS)
def test_the_launcher_is_found(environ: dict[str, str], launcher: tuple[str, int, int] | None) -> None:
    assert find_launcher(environ) == (Launcher(*launcher) if launcher else None)
    assert launched_rank(environ) == (launcher[2] if launcher else 0)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (MPICH, "MPICH 5.0.2"),
        (OPEN_MPI, "Open MPI 5.0.8"),
        ("Intel(R) MPI Library 2021.15 for Linux* OS\n\0", "Intel(R) MPI Library 2021.15 for Linux* OS"),
        ("\0", "an unknown MPI"),
    ],
)
def test_a_library_is_named_in_a_few_words(version: str, name: str) -> None:
    assert library_name(version) == name


def refusal(environ: dict[str, str], world_size: int | None, version: str, executable: Path = NOWHERE) -> LaunchError:
    with pytest.raises(LaunchError) as error:
        check_launcher(environ, world_size, version, command=COMMAND, executable=executable)
    return error.value


def test_the_remedy_is_the_mpirun_beside_python(tmp_path: Path) -> None:
    (tmp_path / "mpirun").touch()
    error = refusal({"OMPI_COMM_WORLD_SIZE": "3"}, 1, MPICH, tmp_path / "python")
    assert error.remedy == f"{tmp_path}/mpirun -np 3 sambasim run --pef 'my model.pef'"
    assert fitting_mpirun(tmp_path / "python", "MPICH 5.0.2") == f"{tmp_path}/mpirun"
    assert fitting_mpirun(NOWHERE, "MPICH 5.0.2") == "mpirun (of MPICH 5.0.2)"


@pytest.mark.parametrize(("version", "interface"), [(MPICH, "pmi2"), (OPEN_MPI, "pmix")])
def test_srun_is_told_the_interface_to_speak(version: str, interface: str) -> None:
    error = str(refusal({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 1, version))
    assert error.startswith(f"srun started 2 ranks, but {library_name(version)} sees 1: ")
    assert f"\n  try:   srun --mpi={interface} -n 2 sambasim run --pef 'my model.pef'" in error


def check(world_size: int, minimum: int, command: Sequence[str] = COMMAND, **more: Any) -> str:
    """What is said of so many replicas."""
    with pytest.raises(LaunchError) as error:
        check_world_size(world_size, minimum, command=command, **{"data_parallel": True, **more})
    return str(error.value)


def test_too_few_replicas_are_refused_with_the_right_command() -> None:
    assert check(1, 2) == (
        "this PEF was compiled for at least 2 replicas (-ws 2), and 1 replica was started\n"
        "  try:   mpirun -np 2 sambasim run --pef 'my model.pef'"
    )
    assert "at least 4 replicas (-ws 4), and 3 replicas were started" in check(3, 4)


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
    command = ["sambasim", "run", "--pef", "net"]
    with pytest.raises(LaunchError) as error:
        replicas_of(3, Mesh(replica), minimum, command=command)
    assert error.value.remedy == remedy.replace("{}", " ".join(command))
    assert replicas_of(3, Mesh(replica), minimum, command=command, whole=True) == 3


@pytest.mark.parametrize(
    ("processes", "whole"), [(1, ""), (4, "; or for 4 replicas: mpirun -np 4 sambasim run --one-process-per-replica")]
)
def test_processes_may_be_replicas_only_if_as_many_were_started(processes: int, whole: str) -> None:
    error = check(1, 2, COMMAND[:2], replica=Mesh({"pp": 2, "tp": 2}), processes=processes)
    assert error.endswith(f"try:   mpirun -np 8 sambasim run{whole}")


@pytest.mark.parametrize("typed", [["--emulate-replicas", "3"], ["--emulate_replicas=3"]])
def test_an_emulation_is_put_right_by_its_own_flag(typed: list[str]) -> None:
    command = ["sambasim", "run", *typed, "--pef", "net"]
    assert check(3, 4, command, emulated=True) == (
        "this PEF was compiled for at least 4 replicas (-ws 4), and --emulate-replicas 3 was given\n"
        "  try:   sambasim run --pef net --emulate-replicas 4"
    )
    assert check(3, 1, command, data_parallel=False, emulated=True).endswith(
        "or run one replica: sambasim run --pef net"
    )


def test_several_ranks_emulate_nothing() -> None:
    with pytest.raises(LaunchError, match=r"plays all replicas in one process, and 2 processes were started") as error:
        check_emulation(2, 3, command=COMMAND)
    assert error.value.remedy == "without mpirun: sambasim run --pef 'my model.pef'"
    check_emulation(1, 3, command=COMMAND)
    check_emulation(2, 1, command=COMMAND)


def test_the_launcher_says_how_many_ranks_share_this_node() -> None:
    assert ranks_of_node({}) == 1
    assert ranks_of_node({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 2
    assert ranks_of_node({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "3"}) == 3


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}


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
    with pytest.raises(LaunchError) as refused:
        mpirun_instead(TORCHRUN, NOWHERE, COMMAND[1:])
    assert str(refused.value) == (
        "torchrun started 2 processes, which MPI would have to connect, and there is no mpirun\n"
        "  try:   python -m pip install mpich; mpirun -np 2 sambasim run --pef 'my model.pef'"
    )
    with pytest.raises(LaunchError, match=r"2 processes on several nodes.*\n.* -np 2 -hosts NODE,NODE sambasim run"):
        mpirun_instead(TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, NOWHERE, COMMAND[1:])


def test_scripts_and_apps_under_torchrun_are_told_of_mpirun() -> None:
    error = refusal(TORCHRUN, None, MPICH)
    assert "MPI does not connect them" in error.what
    assert error.remedy == "mpirun (of MPICH 5.0.2) -np 2 sambasim run --pef 'my model.pef'"
    for world_size in (None, 1):
        check_launcher(TORCHRUN | {"WORLD_SIZE": "1"}, world_size, MPICH, command=COMMAND, executable=NOWHERE)
