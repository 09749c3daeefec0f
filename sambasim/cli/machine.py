"""`sambasim doctor` checks what a run needs on this machine, by a function each; `sambasim bench` times sync paths."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from sambasim import TESTED_TORCH, __version__
from sambasim.cli.shared import COUNT, FILE, answer, as_json, kept_imports, write_all
from sambasim.errors import LaunchError, MachineError, OptionError, SambasimError, say
from sambasim.forks import ran
from sambasim.runtime.machine.launcher import cores_of_this_process, fitting_mpirun
from sambasim.terminal.output import report_error
from sambasim.units import GIB, TIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sambasim.runtime.machine.communicator import Communicator

_COMFORTABLE_BYTES = GIB
"""Of shared memory: what most models need."""

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
    from sambasim.runtime.machine import node_memory

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
    remedy = f"python -m pip install torch=={TESTED_TORCH}"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", "not installed", "nothing works", remedy, stops_a_run=True)
    if version.split("+")[0] == TESTED_TORCH:
        return Check("torch", f"{version} (tested)")
    trouble = f"not a tested version ({TESTED_TORCH}): compile may fail, and bits may differ"
    return Check("torch", version, trouble, remedy)


def mpi_library() -> Check:
    library, error = ran(sys.executable, "-c", _PROBE.format("linked_library()"))
    if library:
        return Check("MPI linked", library.strip())
    return Check("MPI linked", "none", error, _MPI_INSTALL, stops_a_run=True)


def mpirun() -> Check:
    path = shutil.which("mpirun")
    if path is None:
        beside = Path(sys.executable).parent / "mpirun"
        remedy = f"export PATH={beside.parent}:$PATH" if beside.exists() else _MPI_INSTALL
        return Check("mpirun found", "none", "no mpirun on PATH: only one replica can run", remedy, stops_a_run=True)
    lines = (ran(path, "--version")[0] or "").splitlines()
    version = lines[0].replace("mpirun (", "").replace(")", "") if lines else "unknown version"
    for line in lines:  # MPICH's Hydra prints a table, Open MPI a line
        if line.strip().startswith("Version:"):
            version = f"MPICH {line.split()[-1]}"
    return Check("mpirun found", f"{version} ({path})")


def launch(library: str) -> Check:
    """Start two ranks, since this mpirun may belong to another MPI library."""
    probe = _PROBE.format('f\'ranks {connect(["sambasim", "run"]).world_size}\'')
    output, error = ran("mpirun", "-np", "2", sys.executable, "-c", probe)
    if output and "ranks 2" in output:
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
    from sambasim.runtime.machine import node_memory

    name = "shared memory"
    least_bytes = 2 * node_memory.MPI_RESERVE_BYTES + node_memory.MPI_START_BYTES  # of MPI, and a small model
    if free_bytes is None:
        trouble = f"there is no {node_memory.FOLDER}; device sync may be slow or fail"
        return Check(name, "unknown", trouble, "run on Linux, or one replica at a time")
    status = os.statvfs(node_memory.FOLDER)
    value = f"{format_bytes(free_bytes)} free of {format_bytes(status.f_blocks * status.f_frsize)}"
    if free_bytes >= _COMFORTABLE_BYTES:
        return Check(name, value)
    trouble = "device sync keeps parameters, gradients and optimizer state of all replicas of a node in it"
    remedy = f"docker run --shm-size=2g ..., or mount -o remount,size=2g {node_memory.FOLDER}"
    return Check(name, value, trouble, remedy, stops_a_run=free_bytes < least_bytes)


def compiler() -> Check:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is not None:
        version, _ = ran(path, "-dumpfullversion", "-dumpversion")
        return Check("compiler", f"{name} {(version or '').strip()} ({path})")
    trouble = "--engine inductor cannot compile its kernels; everything else works"
    return Check("compiler", "none", trouble, "install g++, or set CXX to your compiler")


def kernels() -> Check:
    import torch

    from sambasim.runtime.values.mean import tree_mean_build

    built = tree_mean_build(torch.float32)
    if not isinstance(built, MachineError):
        return Check("kernels", "gradients are added in one pass over memory")
    trouble = f"gradients are added in several passes over memory, with the same bits: {built.what}"
    return Check("kernels", "none", trouble, built.remedy)


@click.command("doctor")
@as_json("Print one JSON object instead of the table.")
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
    record, stops = {"findings": [check._asdict() for check in checks]}, any(check.stops_a_run for check in checks)
    answer(as_json, lambda: json.dumps(record, indent=2, ensure_ascii=False), lambda: _table(checks, stops))
    context.exit(MachineError.exit_code if stops else 0)


def _table(checks: list[Check], stops: bool) -> "list[RenderableType]":
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
    return [table, "", "A run would fail because of a STOP above." if stops else "A run would work."]


_PATHS = ("device", "host-mpi", "host-gloo", "host-parameter-server", "mpi", "mpi-in-place", "gloo")


@click.group("bench")
def bench_command() -> None:
    """Measure gradient sync on this machine, or between hosts."""


def _bytes(ctx: click.Context, parameter: click.Parameter, text: str) -> int:
    flag = parameter.opts[0]
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}", remedy=f'{flag} "64 KiB"') from None
    if not 1 <= size_bytes <= TIB:
        raise OptionError(f"{flag}: must be from 1 B to {format_bytes(TIB)}", remedy="256 MiB")
    return size_bytes


def _names(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in _PATHS]
    if unknown or not names:
        what = f"there is no path {unknown[0]!r}" if unknown else "no path was named"
        raise OptionError(f"--paths: {what}; there are {', '.join(_PATHS)}", remedy=f"--paths {_PATHS[0]},{_PATHS[-1]}")
    return names


@bench_command.command("collectives")
@click.option("--min-bytes", "least_bytes", default="4 KiB", show_default=True, callback=_bytes, help="Smallest size.")
@click.option("--max-bytes", "most_bytes", default="256 MiB", show_default=True, callback=_bytes, help="Largest size.")
@click.option("--runs", type=COUNT, help="Timed runs of each path at each size.  [default: 7 to 100]")
@click.option("--paths", default=",".join(_PATHS), callback=_names, help="Which paths, with commas.  [default: all]")
@as_json("Print one JSON line, and nothing else.")
@click.option("--plot", type=FILE, metavar="FILE.svg", help="Draw times over sizes as SVG.")
def collectives_command(
    least_bytes: int, most_bytes: int, runs: int | None, paths: tuple[str, ...], as_json: bool, plot: Path | None
) -> None:
    """Time an all-reduce of gradients on every path, for several sizes, and check the results.

    \b
      device        gradients in device memory: run --reduce-on-rdu
      host-...      device to host, as run --host-sync ... does it, host to device
      mpi           the MPI's own Allreduce, which no run uses
      mpi-in-place  the same in one buffer
      gloo          torch.distributed's all_reduce, as DistributedDataParallel uses it

    The device and host-... paths start with gradients in device memory, the mpi and gloo paths with a host buffer. A
    path ends when every rank can read the whole result: in a buffer of its own, or, for device above 64 KiB, in the
    memory of the ranks that own the slices. Each size is four times the one before, in multiples of 256 bytes. The
    paths take turns in one run, with new operands each time, which depend on rank, element and turn. The first and the
    last result of each turn are checked in full, and a wrong one is an error.

    \b
    time                 median over runs; of one run, the longest of any rank
    algorithm bandwidth  bytes / time
    bus bandwidth        algorithm bandwidth × 2 (n - 1) / n, for n ranks;
                         both as PERFORMANCE.md of nccl-tests defines them
    copy bound           the time in which all ranks, at the same time,
                         copy (n + 1) / 2 buffers in all

    \b
    Examples:
      mpirun -np 2 sambasim bench collectives
      mpirun -np 4 sambasim bench collectives --max-bytes 16MiB --plot sync.svg
      mpirun -np 2 sambasim bench collectives --paths device,gloo --json
      mpirun -hosts a,b -ppn 1 -np 2 sambasim bench collectives     between two hosts
    """
    from sambasim.files import check_output_files
    from sambasim.report.summaries import collectives_plot, collectives_report

    if least_bytes > most_bytes:
        sizes = f"{format_bytes(least_bytes)} and {format_bytes(most_bytes)}"
        what = f"--min-bytes is more than --max-bytes: they are {sizes}"
        raise OptionError(what, remedy=f"give both: --min-bytes {most_bytes} --max-bytes {least_bytes}")
    if plot is not None and plot.suffix != ".svg":
        what = f"--plot draws SVG, and {plot} does not end in .svg"
        raise OptionError(what, remedy=f"--plot {plot.with_suffix('.svg')}")
    check_output_files({"--plot": ("the plot", plot)})
    with _job() as communicator:
        if communicator.world_size == 1:
            what = "one rank alone has nothing to sync, so there is nothing to measure"
            raise LaunchError(what, remedy=f"mpirun -np 2 {' '.join(['sambasim', *sys.argv[1:]])}")
        with kept_imports():
            from sambasim.runtime.measure.collectives import Request, measure, sizes_between

        def progress(line: str) -> None:
            if communicator.rank == 0 and not as_json:
                say(f"{line} …", sys.stderr)

        record = measure(communicator, Request(sizes_between(least_bytes, most_bytes), paths, runs), progress)
        if communicator.rank == 0:
            answer(as_json, record.model_dump_json, lambda: [collectives_report(record)])
            if plot is not None:
                write_all({plot: collectives_plot(record)}, quiet=as_json)


@bench_command.command("sync")
@click.option("--hosts", "file", type=FILE, help="Write a cluster of such hosts: a TOML file for `--cluster`.")
@as_json("Print one JSON line, and nothing else.")
def sync_command(file: Path | None, as_json: bool) -> None:
    """Measure the link between hosts, as `run --reduce-on-rdu` uses it: one rank on each sends to the next.

    \b
    latency         of a short message
    bandwidth       of 32 pieces of 1 MiB, while each host sends and receives
    processor time  of a rank, for each byte that it receives, and one that it sends

    The cluster is sn30-8 with one RDU a node and this link between nodes. `plan --here` reads the link alone.

    \b
    Examples:
      mpirun -hosts a,b -ppn 1 -np 2 sambasim bench sync --hosts hosts.toml
      sambasim plan configs/char_gpt.toml --here --cluster hosts.toml --nodes 2
      sambasim simulate configs/char_gpt.toml --replicas 2 --cluster hosts.toml
    """
    import tomli_w

    from sambasim.files import check_output_files
    from sambasim.units import format_rate, format_seconds

    check_output_files({"--hosts": ("the cluster", file)})
    with _job() as communicator:
        from sambasim.runtime.measure.hosts import measure_hosts

        cluster = measure_hosts(communicator)
        link = cluster.network_link
        if communicator.rank == 0:
            figures = f"{format_seconds(link.latency_s)}, {format_rate(link.bandwidth_bytes_per_s)}B/s each way"
            text = f"{figures}, {link.processor_s_per_byte * 1e9:.2f} ns of processor time a byte"
            answer(as_json, link.model_dump_json, lambda: [text])
            if file is not None:
                write_all({file: tomli_w.dumps(cluster.model_dump(exclude_unset=True))}, quiet=as_json)


@contextmanager
def _job() -> Iterator["Communicator"]:
    from sambasim.runtime.machine.agreement import check_job
    from sambasim.runtime.machine.mpi import connect
    from sambasim.runtime.watch.supervisor import Supervisor

    communicator = connect(["sambasim", *sys.argv[1:]])
    with Supervisor(communicator, report=lambda each: report_error(each.error, each.reporter)):
        check_job(communicator, None)
        yield communicator
    communicator.close()
