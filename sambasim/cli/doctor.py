"""`sambasim doctor` checks what a run needs on this machine, one function for each check."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict

from sambasim import __version__
from sambasim.errors import MachineError
from sambasim.runtime.machine import shared_memory
from sambasim.runtime.machine.launcher import fitting_mpirun
from sambasim.runtime.machine.resources import cores_of_this_process
from sambasim.terminal.output import show
from sambasim.units import MIB, format_bytes

TESTED_TORCH = ("2.13.0",)

LEAST_SHARED_MEMORY_BYTES = 2 * shared_memory.MPI_RESERVE_BYTES + shared_memory.MPI_START_BYTES
"""What MPI and the smallest model need with two replicas; a run fails with less."""

COMFORTABLE_SHARED_MEMORY_BYTES = 1024 * MIB
"""Device sync keeps parameters, gradients and optimizer state of all replicas of a node in shared memory."""

_TIMEOUT_S = 60.0
_RANKS = 2
_MPI_INSTALL = "python -m pip install mpich   (or load your cluster's MPI)"

_PROBE = """
from sambasim.errors import SambasimError
from sambasim.runtime.machine.mpi import connect, linked_library
try:
    print({}, flush=True)
except SambasimError as error:
    raise SystemExit(error.what)
"""
"""For another process, because one that has started MPI cannot be used for anything else."""


class Finding(BaseModel):
    """The result of one check: `trouble` is what is wrong, `remedy` how to fix it. If `stops_a_run`, a run with several
    replicas would fail."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    value: str
    trouble: str | None = None
    remedy: str | None = None
    stops_a_run: bool = False


def examine() -> Sequence[Finding]:
    """All findings about this machine and this Python. Takes a second or two, and at most 90 s."""
    library, launcher = mpi_library(), mpirun()
    fit = () if library.stops_a_run or launcher.stops_a_run else (launch(library.value),)
    python = Finding(name="python", value=f"{platform.python_version()} ({sys.executable})")
    memory = shared_memory_space(shared_memory.free_bytes())
    return (python, torch(), library, launcher, *fit, cores(), threads(), memory, compiler(), kernels())


def versions() -> dict[str, str]:
    """By name, without starting MPI or importing torch."""
    from sambasim.errors import SambasimError
    from sambasim.runtime.machine.mpi import linked_library

    try:
        mpi = linked_library()
    except SambasimError:
        mpi = "none"
    try:
        of_torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        of_torch = "none"
    return {
        "sambasim": __version__,
        "Python": platform.python_version(),
        "torch": of_torch,
        "MPI": mpi,
        "CPU": f"{_cpu()}, {len(cores_of_this_process())} of {os.cpu_count()} cores",
    }


def _cpu() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _blocker(name: str, value: str, trouble: str, remedy: str) -> Finding:
    return Finding(name=name, value=value, trouble=trouble, remedy=remedy, stops_a_run=True)


def torch() -> Finding:
    """The installed torch, by its metadata: importing it would take seconds."""
    remedy = f"python -m pip install torch=={TESTED_TORCH[-1]}"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return _blocker("torch", "not installed", "nothing works", remedy)
    if version.split("+")[0] in TESTED_TORCH:
        return Finding(name="torch", value=f"{version} (tested)")
    trouble = f"not a tested version ({', '.join(TESTED_TORCH)}): compile may fail, and bits may differ"
    return Finding(name="torch", value=version, trouble=trouble, remedy=remedy)


def mpi_library() -> Finding:
    output = _run([sys.executable, "-c", _PROBE.format("linked_library()")])
    if output.returncode == 0:
        return Finding(name="MPI linked", value=output.stdout.strip())
    return _blocker("MPI linked", "none", _last_line(output), _MPI_INSTALL)


def mpirun() -> Finding:
    path = shutil.which("mpirun")
    if path is None:
        beside = Path(sys.executable).parent / "mpirun"
        remedy = f"export PATH={beside.parent}:$PATH" if beside.exists() else _MPI_INSTALL
        return _blocker("mpirun found", "none", "no mpirun on PATH: only one replica can run", remedy)
    lines = _run([path, "--version"]).stdout.splitlines()
    version = lines[0].replace("mpirun (", "").replace(")", "") if lines else "unknown version"
    for line in lines:  # MPICH's Hydra prints a table, Open MPI a line
        if line.strip().startswith("Version:"):
            version = f"MPICH {line.split()[-1]}"
    return Finding(name="mpirun found", value=f"{version} ({path})")


def launch(library: str) -> Finding:
    """Whether this mpirun belongs to this MPI library: start two ranks with it."""
    probe = _PROBE.format("'ranks', connect(['sambasim', 'run']).world_size")
    output = _run(["mpirun", "-np", str(_RANKS), sys.executable, "-c", probe])
    if f"ranks {_RANKS}" in output.stdout:
        return Finding(name="MPI start", value=f"mpirun -np {_RANKS} starts {_RANKS} ranks that find each other")
    remedy = f"{fitting_mpirun(Path(sys.executable), library)} -np {_RANKS} sambasim run ..."
    return _blocker("MPI start", "fails", _last_line(output), remedy)


def cores() -> Finding:
    usable, there = len(cores_of_this_process()), os.cpu_count() or 1
    trouble = remedy = None
    if usable < there:
        trouble = "this process and the ranks that it starts cannot use all cores"
        remedy = f"taskset -c 0-{there - 1} ...   (or ask the scheduler for more cores)"
    return Finding(name="cores", value=f"{usable} of {there}", trouble=trouble, remedy=remedy)


def threads() -> Finding:
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if not chosen:
        return Finding(name="threads", value=f"{len(cores_of_this_process())} divided by the replicas of the node")
    return Finding(name="threads", value=f"{chosen} a rank (OMP_NUM_THREADS)")


def shared_memory_space(free_bytes: int | None) -> Finding:
    """Size and free space of /dev/shm; `free_bytes` is None where there is none."""
    name = "shared memory"
    if free_bytes is None:
        trouble = f"there is no {shared_memory.FOLDER}; device sync may be slow or fail"
        return Finding(name=name, value="unknown", trouble=trouble, remedy="run on Linux, or one replica at a time")
    status = os.statvfs(shared_memory.FOLDER)
    value = f"{format_bytes(free_bytes)} free of {format_bytes(status.f_blocks * status.f_frsize)}"
    if free_bytes >= COMFORTABLE_SHARED_MEMORY_BYTES:
        return Finding(name=name, value=value)
    return Finding(
        name=name,
        value=value,
        trouble="device sync keeps parameters, gradients and optimizer state of all replicas of a node in it",
        remedy=f"docker run --shm-size=2g ..., or mount -o remount,size=2g {shared_memory.FOLDER}",
        stops_a_run=free_bytes < LEAST_SHARED_MEMORY_BYTES,
    )


def compiler() -> Finding:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is not None:
        version = _run([path, "-dumpfullversion", "-dumpversion"]).stdout.strip()
        return Finding(name="compiler", value=f"{name} {version} ({path})")
    trouble = "--engine inductor cannot compile its kernels; everything else works"
    remedy = "install g++, or set CXX to your compiler"
    return Finding(name="compiler", value="none", trouble=trouble, remedy=remedy)


def kernels() -> Finding:
    import torch

    from sambasim.runtime.values.mean import tree_mean_build

    error = tree_mean_build(torch.float32).trouble
    if error is None:
        return Finding(name="kernels", value="gradients are added in one pass over memory")
    trouble = f"gradients are added in several passes over memory, with the same bits: {error.what}"
    return Finding(name="kernels", value="none", trouble=trouble, remedy=error.remedy)


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command; if it does not end or cannot start, the result is a failed one with the reason on stderr."""
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} did not answer within {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _last_line(output: "subprocess.CompletedProcess[str]") -> str:
    lines = (output.stderr.strip() or output.stdout.strip()).splitlines()
    return lines[-1].strip() if lines else f"it ended with exit code {output.returncode}"


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def doctor_command(context: click.Context, as_json: bool) -> None:
    """Check MPI, torch, cores, shared memory and compiler.

    Prints what would make a run fail, and how to fix it. The exit code is not 0 if a run with several replicas would
    fail.

    \b
    Examples:
      sambasim doctor
      sambasim doctor --json
    """
    findings = examine()
    stops = any(finding.stops_a_run for finding in findings)
    if as_json:
        print(json.dumps({"findings": [finding.model_dump() for finding in findings]}, indent=2, ensure_ascii=False))
    else:
        _show(findings, "A run would fail because of a STOP above." if stops else "A run would work.")
    context.exit(MachineError.exit_code if stops else 0)


def _show(findings: Sequence[Finding], verdict: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = Text("STOP", "red") if finding.stops_a_run else Text("note", "yellow") if finding.trouble else "ok"
        table.add_row(finding.name, mark, finding.value)
        if finding.trouble:
            table.add_row("", "", finding.trouble)
        if finding.remedy:
            table.add_row("", "", f"try: {finding.remedy}")
    show(table, "", verdict)
