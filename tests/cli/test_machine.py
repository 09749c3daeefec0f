"""`sambasim doctor` on this machine, and on machines that lack something; a refused `sambasim bench collectives`."""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sambasim.cli import machine
from sambasim.cli.machine import Check
from sambasim.units import GIB, MIB
from tests.cli.typed import invoked
from tests.faults.command import sambasim

NOTE = Check("compiler", "none", "kernels [cannot] be compiled", "install g++")
STOP = Check("mpirun found", "none", "no mpirun", "pip install mpich", stops_a_run=True)


def test_this_machine_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    result = invoked("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert not [finding for finding in findings.values() if finding["stops_a_run"]]
    assert result.exit_code == 0
    assert findings["MPI start"]["value"] == "mpirun -np 2 starts 2 ranks that find each other"
    assert findings["torch"]["value"].startswith(metadata.version("torch"))
    names = "python, torch, MPI linked, mpirun found, MPI start, cores, threads, shared memory, compiler, kernels"
    assert ", ".join(findings) == names


@pytest.mark.parametrize(("others", "exit_code"), [([], 0), ([STOP], 2)])
def test_the_table_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, others: list[Check], exit_code: int) -> None:
    monkeypatch.setattr(machine, "examine", lambda: [Check("torch", "2.13.0 (tested)"), NOTE, *others])
    result = invoked("doctor")
    assert result.exit_code == exit_code
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    shown = "torch ok 2.13.0 (tested), compiler note none, kernels [cannot] be compiled, try: install g++"
    assert ", ".join(lines[:4]) == shown
    assert ("mpirun found STOP none" in lines) is bool(others)
    assert lines[-1] == ("A run would fail because of a STOP above." if others else "A run would work.")


def test_no_mpirun_beside_a_python_that_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert machine.mpirun().remedy == "python -m pip install mpich   (or load your cluster's MPI)"
    (tmp_path / "mpirun").touch()
    trouble, remedy = "no mpirun on PATH: only one replica can run", f"export PATH={tmp_path}:$PATH"
    assert machine.mpirun() == Check("mpirun found", "none", trouble, remedy, stops_a_run=True)


def test_no_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    _, *facts, _, stops = machine.mpi_library()
    assert (facts, stops) == (["none", "mpi4py finds no MPI library: cannot load MPI library"], True)


def test_an_mpirun_of_another_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in that starts one process and gives it the environment of two."""
    launcher = tmp_path / "mpirun"
    launcher.write_text('#!/bin/sh\nshift 2\nPMI_SIZE=2 PMI_RANK=0 exec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    check = machine.launch("MPICH 5.0.2")
    assert (check.value, check.stops_a_run) == ("fails", True)
    assert "started 2 ranks, but" in str(check.trouble)
    assert str(check.remedy).endswith("-np 2 sambasim run ...")


def test_torch_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cpu")
    assert machine.torch().trouble is None
    monkeypatch.setattr(metadata, "version", lambda _: "2.14.1")
    other = machine.torch()
    assert other.trouble == "not a tested version (2.13.0): compile may fail, and bits may differ"
    assert not other.stops_a_run
    monkeypatch.setattr(metadata, "version", missing)
    none = machine.torch()
    assert (none.stops_a_run, none.remedy) == (True, "python -m pip install torch==2.13.0")


@pytest.mark.parametrize(
    ("free_bytes", "has_trouble", "stops"),
    [(2 * GIB, False, False), (64 * MIB, True, False), (MIB, True, True), (None, True, False)],
)
def test_shared_memory_by_free_space(free_bytes: int | None, has_trouble: bool, stops: bool) -> None:
    check = machine.shared_memory_space(free_bytes)
    assert (check.trouble is not None, check.stops_a_run) == (has_trouble, stops)
    assert (check.value == "unknown") is (free_bytes is None)


def test_cores_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine.threads().value == "3 a rank (OMP_NUM_THREADS)"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine.threads().value.endswith(" divided by the replicas of the node")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "cores_of_this_process", lambda: frozenset({0}))
    cores = machine.cores()
    assert (cores.value, cores.stops_a_run) == ("1 of 64", False)
    assert cores.remedy == "taskset -c 0-63 ...   (or ask the scheduler for more cores)"


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = machine.compiler()
    assert (check.value, check.stops_a_run) == ("none", False)
    assert check.trouble == "--engine inductor cannot compile its kernels; everything else works"
    (tmp_path / "g++").write_text("#!/bin/sh\necho 13.2.0\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", "")
    assert machine.compiler().value == f"g++ 13.2.0 ({tmp_path}/g++)"


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (["--min-bytes", "1K"], "--min-bytes: '1K' is not a size", '--min-bytes "64 KiB"'),
        (["--max-bytes", "9" * 5000], "is too large", '--max-bytes "64 KiB"'),
        (["--max-bytes", "0"], "--max-bytes: must be from 1 B to 1.0 TiB", "256 MiB"),
        (["--min-bytes", "2KiB", "--max-bytes", "1KiB"], "--min-bytes is more than --max-bytes", "--min-bytes"),
        (["--min-bytes", "1GiB"], "--max-bytes: they are 1.0 GiB and 256.0 MiB", "--max-bytes 1073741824"),
        (["--paths", "device,nccl"], "there is no path 'nccl'", "--paths device,gloo"),
        (["--paths", ","], "no path was named", "--paths device,gloo"),
        (["--plot", "sync.png"], "sync.png does not end in .svg", "--plot sync.svg"),
        (["--plot", "/proc/sync.svg"], "the plot cannot be written to /proc/sync.svg", "another place"),
    ],
)
def test_a_wrong_flag_is_refused_before_mpi_starts(
    tmp_path: Path, arguments: list[str], what: str, remedy: str
) -> None:
    result = sambasim(["bench", "collectives", *arguments], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error[option]: ")
    assert what in result.stderr
    assert remedy in result.stderr.split("try:")[1]


def test_one_rank_has_nothing_to_sync(tmp_path: Path) -> None:
    result = sambasim(["bench", "collectives", "--max-bytes", "4KiB"], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "error[launch]: one rank alone has nothing to sync" in result.stderr
    assert "try:   mpirun -np 2 sambasim bench collectives --max-bytes 4KiB" in result.stderr
