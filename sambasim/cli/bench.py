"""`sambasim bench`: the times of all sync paths on this machine, in one run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.bounded import shortened
from sambasim.cli.shared import COUNT, FILE, answer, as_json, kept_imports, write_all
from sambasim.errors import LaunchError, OptionError
from sambasim.terminal.output import exit_code_of, report_error
from sambasim.units import TIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from sambasim.runtime.watch.supervisor import Failure

_PATHS = ("device", "host-mpi", "host-gloo", "host-parameter-server", "mpi", "mpi-in-place", "gloo")


@click.group("bench")
def bench_command() -> None:
    """Measure gradient sync on this machine."""


def _bytes(ctx: click.Context, parameter: click.Parameter, text: str) -> int:
    flag = parameter.opts[0]
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"{flag}: {shortened(str(error))}", remedy=f'{flag} "64 KiB"') from None
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
    """
    from sambasim.commands.outputs import check_output_files
    from sambasim.report.summaries import collectives_plot, collectives_report
    from sambasim.runtime.machine.mpi import connect
    from sambasim.runtime.watch.supervisor import Supervisor

    if least_bytes > most_bytes:
        sizes = f"{format_bytes(least_bytes)} and {format_bytes(most_bytes)}"
        raise OptionError(
            f"--min-bytes is more than --max-bytes: they are {sizes}",
            remedy=f"give both: --min-bytes {most_bytes} --max-bytes {least_bytes}",
        )
    if plot is not None and plot.suffix != ".svg":
        what = f"--plot draws SVG, and {plot} does not end in .svg"
        raise OptionError(what, remedy=f"--plot {plot.with_suffix('.svg')}")
    check_output_files({"--plot": ("the plot", plot)})
    command = ["sambasim", *sys.argv[1:]]
    communicator = connect(command)
    if communicator.world_size == 1:
        raise LaunchError(
            "one rank alone has nothing to sync, so there is nothing to measure",
            remedy=f"mpirun -np 2 {' '.join(command)}",
        )

    def report(failure: "Failure") -> None:
        report_error(failure.error, failure.reporter)

    def progress(line: str) -> None:
        if communicator.rank == 0 and not as_json:
            print(f"{line} …", file=sys.stderr)

    with Supervisor(communicator, report=report, exit_code=exit_code_of):
        with kept_imports():
            from sambasim.runtime.measure.collectives import Request, measure, sizes_between

        record = measure(communicator, Request(sizes_between(least_bytes, most_bytes), paths, runs), progress)
        if communicator.rank == 0:
            answer(as_json, record.model_dump_json, lambda: [collectives_report(record)])
            if plot is not None:
                write_all({plot: collectives_plot(record)}, quiet=as_json)
    communicator.close()
