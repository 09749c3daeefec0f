"""`sambasim doctor` checks what a run needs on this machine, one function for each check."""

import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from sambasim import __version__
from sambasim.cli import shared
from sambasim.errors import MachineError, SambasimError
from sambasim.runtime.machine import node_memory
from sambasim.runtime.machine.launcher import fitting_mpirun
from sambasim.runtime.machine.resources import cores_of_this_process
from sambasim.units import GIB, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

_TESTED_TORCH = "2.13.0"
_COMFORTABLE_BYTES, _LEAST_BYTES = GIB, 2 * node_memory.MPI_RESERVE_BYTES + node_memory.MPI_START_BYTES
"""Of shared memory: what most models need, and what MPI and the smallest model with two replicas do."""

_TIMEOUT_S = 60.0
_MPI_INSTALL = "python -m pip install mpich   (or load your cluster's MPI)"

_PROBE = """
import sys
from sambasim.errors import SambasimError
from sambasim.runtime.machine.mpi import connect, linked_library
try:
    sys.stdout.write({} + "\\n")  # in one piece: two ranks write
except SambasimError as error:
    raise SystemExit(error.what)
"""
"""For another process, because one that has started MPI cannot be used for anything else."""


class Check(NamedTuple):
    """`trouble` is what is wrong, `remedy` how to fix it. `stops_a_run`: one with several replicas would fail."""

    name: str
    value: str
    trouble: str | None = None
    remedy: str | None = None
    stops_a_run: bool = False


def examine() -> list[Check]:
    """All checks of this machine and this Python. Takes a second or two, and at most 90 s."""
    library, launcher = mpi_library(), mpirun()
    fit = [] if library.stops_a_run or launcher.stops_a_run else [launch(library.value)]
    python = Check("python", f"{platform.python_version()} ({sys.executable})")
    memory = shared_memory_space(node_memory.free_bytes())
    return [python, torch(), library, launcher, *fit, cores(), threads(), memory, compiler(), kernels()]


def versions() -> dict[str, str]:
    """By name, without starting MPI or importing torch."""
    from sambasim.runtime.machine.mpi import linked_library

    mpi, of_torch, cpu = "none", "none", platform.machine()
    with suppress(SambasimError):
        mpi = linked_library()
    with suppress(metadata.PackageNotFoundError):
        of_torch = metadata.version("torch")
    with suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        cpu = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    own = {"sambasim": __version__, "Python": platform.python_version(), "torch": of_torch, "MPI": mpi}
    return {**own, "CPU": f"{cpu}, {len(cores_of_this_process())} of {os.cpu_count()} cores"}


def torch() -> Check:
    """The installed torch, by its metadata: importing it would take seconds."""
    remedy = f"python -m pip install torch=={_TESTED_TORCH}"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", "not installed", "nothing works", remedy, stops_a_run=True)
    if version.split("+")[0] == _TESTED_TORCH:
        return Check("torch", f"{version} (tested)")
    trouble = f"not a tested version ({_TESTED_TORCH}): compile may fail, and bits may differ"
    return Check("torch", version, trouble, remedy)


def mpi_library() -> Check:
    library, error = _run(sys.executable, "-c", _PROBE.format("linked_library()"))
    if library:
        return Check("MPI linked", library.strip())
    return Check("MPI linked", "none", error, _MPI_INSTALL, stops_a_run=True)


def mpirun() -> Check:
    path = shutil.which("mpirun")
    if path is None:
        beside = Path(sys.executable).parent / "mpirun"
        remedy = f"export PATH={beside.parent}:$PATH" if beside.exists() else _MPI_INSTALL
        return Check("mpirun found", "none", "no mpirun on PATH: only one replica can run", remedy, stops_a_run=True)
    lines = _run(path, "--version")[0].splitlines()
    version = lines[0].replace("mpirun (", "").replace(")", "") if lines else "unknown version"
    for line in lines:  # MPICH's Hydra prints a table, Open MPI a line
        if line.strip().startswith("Version:"):
            version = f"MPICH {line.split()[-1]}"
    return Check("mpirun found", f"{version} ({path})")


def launch(library: str) -> Check:
    """Whether this mpirun belongs to this MPI library: start two ranks with it."""
    probe = _PROBE.format('f\'ranks {connect(["sambasim", "run"]).world_size}\'')
    output, error = _run("mpirun", "-np", "2", sys.executable, "-c", probe)
    if "ranks 2" in output:
        return Check("MPI start", "mpirun -np 2 starts 2 ranks that find each other")
    remedy = f"{fitting_mpirun(Path(sys.executable), library)} -np 2 sambasim run ..."
    return Check("MPI start", "fails", error, remedy, stops_a_run=True)


def cores() -> Check:
    usable, there = len(cores_of_this_process()), os.cpu_count() or 1
    trouble = "this process and the ranks that it starts cannot use all cores"
    remedy = f"taskset -c 0-{there - 1} ...   (or ask the scheduler for more cores)"
    return Check("cores", f"{usable} of {there}", *((trouble, remedy) if usable < there else ()))


def threads() -> Check:
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    by_cores = f"{len(cores_of_this_process())} divided by the replicas of the node"
    return Check("threads", f"{chosen} a rank (OMP_NUM_THREADS)" if chosen else by_cores)


def shared_memory_space(free_bytes: int | None) -> Check:
    """Size and free space of /dev/shm; `free_bytes` is None where there is none."""
    name = "shared memory"
    if free_bytes is None:
        trouble = f"there is no {node_memory.FOLDER}; device sync may be slow or fail"
        return Check(name, "unknown", trouble, "run on Linux, or one replica at a time")
    status = os.statvfs(node_memory.FOLDER)
    value = f"{format_bytes(free_bytes)} free of {format_bytes(status.f_blocks * status.f_frsize)}"
    if free_bytes >= _COMFORTABLE_BYTES:
        return Check(name, value)
    trouble = "device sync keeps parameters, gradients and optimizer state of all replicas of a node in it"
    remedy = f"docker run --shm-size=2g ..., or mount -o remount,size=2g {node_memory.FOLDER}"
    return Check(name, value, trouble, remedy, stops_a_run=free_bytes < _LEAST_BYTES)


def compiler() -> Check:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is not None:
        version, _ = _run(path, "-dumpfullversion", "-dumpversion")
        return Check("compiler", f"{name} {version.strip()} ({path})")
    trouble = "--engine inductor cannot compile its kernels; everything else works"
    return Check("compiler", "none", trouble, "install g++, or set CXX to your compiler")


def kernels() -> Check:
    import torch

    from sambasim.runtime.values.mean import tree_mean_build

    error = tree_mean_build(torch.float32).trouble
    if error is None:
        return Check("kernels", "gradients are added in one pass over memory")
    trouble = f"gradients are added in several passes over memory, with the same bits: {error.what}"
    return Check("kernels", "none", trouble, error.remedy)


def _run(*command: str) -> tuple[str, str]:
    """What a command prints, nothing if it fails, and its last line, or why it could not start or has not ended."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer within {_TIMEOUT_S:.0f} s"
    except OSError as error:
        return "", str(error)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    last = lines[-1].strip() if lines else f"it ended with exit code {done.returncode}"
    return "" if done.returncode else done.stdout, last


@click.command("doctor")
@shared.as_json("Print one JSON object instead of the table.")
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
    checks = examine()
    record = {"findings": [check._asdict() for check in checks]}
    shared.answer(as_json, lambda: json.dumps(record, indent=2, ensure_ascii=False), lambda: _table(checks))
    context.exit(MachineError.exit_code if any(check.stops_a_run for check in checks) else 0)


def _table(checks: list[Check]) -> "list[RenderableType]":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark = Text("STOP", "red") if check.stops_a_run else Text("note", "yellow") if check.trouble else "ok"
        table.add_row(check.name, mark, check.value)
        for line in (check.trouble, check.remedy and f"try: {check.remedy}"):
            if line:
                table.add_row("", "", line)
    stops = any(check.stops_a_run for check in checks)
    return [table, "", "A run would fail because of a STOP above." if stops else "A run would work."]
