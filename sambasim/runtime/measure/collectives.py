"""Measure the all-reduce paths, size by size: interleaved in one run, at the same time on all ranks.

In each turn, every path runs several times in a row, with its bytes and code in the caches; the copy bound takes its
turn like a path. After the first and the last run of a turn, every rank checks the whole result.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from sambasim.errors import MachineError
from sambasim.ir.program import Program
from sambasim.ir.types import align
from sambasim.records.metrics import CollectivesRecord, LeftOutRecord, PathRecord, SizeRecord
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import Communicator, SharedWindow
from sambasim.runtime.machine.node_memory import collapse
from sambasim.runtime.measure import paths as measured_paths
from sambasim.runtime.measure.paths import ELEMENT_BYTES, Expected, Measured, Operands, Setting, flat_program
from sambasim.runtime.values.memory import DeviceMemory
from sambasim.units import MIB, counted, format_bytes


def order(count: int, turn: int) -> Sequence[int]:
    """The order of `count` candidates in turn `turn`, in which each follows every other one equally often in `count`
    turns, or twice as many if that is odd: by the caches, each affects the next. Source: E. J. Williams, Experimental
    designs balanced for the estimation of residual effects of treatments, 1949."""
    if count == 2:
        return (0, 1)  # in alternating order, each would follow itself
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    shifted = tuple((place + turn) % count for place in zigzag)
    return shifted[::-1] if count % 2 and turn % 2 else shifted


_LEAST_RUNS, _MOST_RUNS = 7, 100
_BYTES_OF_ALL_RUNS = 512 * MIB


class Request(NamedTuple):
    """What to measure. `runs` is the number of timed runs of each path and size; None for a default by size."""

    sizes_bytes: Sequence[int]
    paths: Sequence[str]
    runs: int | None = None


def sizes_between(least_bytes: int, most_bytes: int) -> tuple[int, ...]:
    """Sizes from `least_bytes` to `most_bytes`, each four times the previous one, rounded up to whole cuts."""
    sizes = [least_bytes]
    while sizes[-1] * 4 < most_bytes:
        sizes.append(sizes[-1] * 4)
    whole = {align(size, measured_paths.GRANULE_BYTES) for size in (*sizes, most_bytes)}
    return tuple(sorted(whole))


def measure(communicator: Communicator, request: Request, report: Callable[[str], None]) -> CollectivesRecord:
    """Collective, for two ranks or more; `report` is called with the progress. Sizes for which a node lacks memory are
    listed as left out. Raises MachineError if all are, and an error for a wrong result."""
    threads = process.default_threads(communicator, 1)
    with ExitStack() as stack:
        stack.enter_context(process.repeatable(threads))
        if not measured_paths.THROUGH_GLOO.isdisjoint(request.paths):
            process.bring_up(communicator)
            stack.callback(process.take_down)
        sizes, left_out, window = _fitting(communicator, request)
        if left_out:
            report(f"sizes up to {format_bytes(sizes[-1])}, because larger ones do not fit into memory")
        records = []
        stack.enter_context(process.gloo_errors(all_errors=False))
        for size_bytes in sizes:
            runs = request.runs or min(max(_BYTES_OF_ALL_RUNS // size_bytes, _LEAST_RUNS), _MOST_RUNS)
            report(f"{format_bytes(size_bytes)}: {counted(runs, 'run')} of {', '.join(request.paths)} and of a copy")
            program = flat_program(size_bytes // ELEMENT_BYTES)
            records.append(_measure_size(communicator, program, request, runs, window))
    return CollectivesRecord(
        world_size=communicator.world_size,
        node_of=communicator.node_of,
        threads=threads,
        torch=torch.__version__,
        mpi=communicator.library,
        sizes=tuple(records),
        left_out=left_out,
    )


def _fitting(
    communicator: Communicator, request: Request
) -> tuple[Sequence[int], tuple[LeftOutRecord, ...], SharedWindow | None]:
    """Collective. The sizes that can be measured, those that cannot, and a window for the largest that can."""
    sizes = list(request.sizes_bytes)
    left_out: list[LeftOutRecord] = []
    window = None
    while True:
        try:
            measured_paths.check_host_memory(communicator, sizes[-1], request.paths)
            if "device" in request.paths:
                device_bytes = flat_program(sizes[-1] // ELEMENT_BYTES).device_bytes
                # On one node the second half, the operand buffer, stays unused.
                touched_bytes = device_bytes // 2 if communicator.node_count == 1 else device_bytes
                window = communicator.allocate_shared(device_bytes, touched := [(0, touched_bytes)])
                collapse(window.parts[communicator.local_rank], touched)
        except MachineError as error:
            if len(sizes) == 1:
                raise
            left_out.insert(0, LeftOutRecord(size_bytes=sizes.pop(), reason=error.what))
        else:
            return sizes, tuple(left_out), window


def _measure_size(
    communicator: Communicator, program: Program, request: Request, runs: int, window: SharedWindow | None
) -> SizeRecord:
    numel = program.groups[0].numel
    memory = DeviceMemory.private(program)
    setting = Setting(program, communicator, window, memory, *measured_paths.private_buffers(numel))
    paths = {name: make(setting) for name, make in measured_paths.PATHS.items() if name in request.paths}
    copy = measured_paths.copy_bound(setting)
    times_s = _times_s(communicator, {**paths, "copy": copy}, numel, runs)
    copy_bound_s = statistics.median(times_s["copy"])
    world_size, size_bytes = communicator.world_size, numel * ELEMENT_BYTES

    def record(name: str, path: Measured) -> PathRecord:
        measured_s = statistics.median(times_s[name])
        return PathRecord(
            path=name,
            result="sum" if path.expects == "near_sum" else "mean",
            checked="bits" if path.expects == "mean" else "rounding",
            measured_s=measured_s,
            least_s=min(times_s[name]),
            algorithm_bytes_per_s=size_bytes / measured_s,
            bus_bytes_per_s=size_bytes / measured_s * 2 * (world_size - 1) / world_size,
            to_copy_bound=measured_s / copy_bound_s,
        )

    return SizeRecord(
        size_bytes=size_bytes,
        runs=runs,
        copy_bytes=world_size * copy.operand.nbytes,
        copy_bound_s=copy_bound_s,
        paths=tuple(record(name, path) for name, path in paths.items()),
    )


def _times_s(
    communicator: Communicator, candidates: Mapping[str, Measured], numel: int, runs: int
) -> Mapping[str, Sequence[float]]:
    """Collective. By path, the time of the slowest rank in each run: about ten a turn, in at least four turns."""
    names = list(candidates)
    own: dict[str, list[float]] = {name: [] for name in names}
    turns = min(max(4, runs // 10), runs)
    for turn in range(turns):
        operands = measured_paths.draw(turn, communicator.rank, communicator.world_size, numel)
        for name in (names[number] for number in order(len(names), turn)):
            runs_here = runs // turns + (turn < runs % turns)
            own[name] += _turn_s(communicator, name, candidates[name], operands, runs_here, turn)
    of_ranks = communicator.all_gather_object(own)
    return {name: [max(run) for run in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)] for name in own}


def _turn_s(
    communicator: Communicator, name: str, candidate: Measured, operands: Operands, runs: int, turn: int
) -> Sequence[float]:
    """Collective. The times of this rank for `runs` runs in a row, after one warm-up run."""
    times_s = []
    expected: Expected = getattr(operands, candidate.expects)
    for run in range(1 + runs):
        candidate.refill(operands.own)
        communicator.barrier()
        began_s = time.perf_counter()
        candidate.run()
        times_s.append(time.perf_counter() - began_s)
        for start, part in candidate.parts if run in (0, runs) else ():
            if (wrong := expected.first_difference(part, start)) is not None:
                raise candidate.wrong_result(
                    f"{name} gave a wrong result: {float(part[wrong - start])} and not {expected.at(wrong)}",
                    where=f"element {wrong}, on rank {communicator.rank}, in run {run} of turn {turn}",
                )
        communicator.barrier()  # other ranks may still read what is overwritten next
    return times_s[1:]
