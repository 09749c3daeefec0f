"""Measure this machine for `sambasim plan --here`: the operators of a model, the update, messages and memory.

For 1, 2, … ranks, up to the number of cores, one job of that many ranks runs real passes of a replica, all at the same
time, as `sambasim run` would: operators are timed where they run, with the caches and the memory bandwidth that other
ranks leave them. The job reads what to run from a file in a folder of its own, and writes what rank 0 has measured.

    python -m sambasim.runtime.measure.machine FOLDER
"""

import importlib
import os
import pickle
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from math import inf
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sambasim.data.buckets import Shapes
from sambasim.data.datasets import Source, open_source
from sambasim.errors import DataError, MachineError, SambasimError
from sambasim.forks import ran
from sambasim.hardware.budget import available_bytes
from sambasim.ir.graph import Node
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.options.training import DataOptions, OptimizerOptions
from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.engine.update import Update
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.launcher import cores_of_this_process, mpirun_here
from sambasim.runtime.machine.mpi import connect as connect_ranks
from sambasim.runtime.machine.process import default_threads, keep_freed_memory
from sambasim.runtime.run.replica import Shard, input_specs
from sambasim.runtime.transports.connect import Way, open_ranks
from sambasim.runtime.transports.in_process import finished
from sambasim.runtime.transports.messages import MessageGroup
from sambasim.runtime.values.memory import DeviceMemory, place_inputs
from sambasim.runtime.values.optimizers import Optimizers, bind_arguments
from sambasim.runtime.watch.observer import Function, StepObserver
from sambasim.simulation.machine import Machine, PassTimes, Rates
from sambasim.units import KIB, MIB, counted

T = TypeVar("T")

_WORK, _RATES, _ERROR = "work.pickle", "rates.pickle", "error.txt"  # the files of a job, in its folder
_TIMEOUT_S = 600.0
_GEMM_SIZE, _COPY_BYTES = 1024, 64 * MIB


class Work(NamedTuple):
    """What a job runs: the program of a replica for each number of samples, and its data and optimizer."""

    programs: tuple[Program, ...]
    data: DataOptions
    optimizer: OptimizerOptions


def measure_machine(
    work_for: Callable[[int], Work], ranks: int, on_phase: Callable[[str], None] = lambda phase: None
) -> Machine:
    """Measure for up to `ranks` ranks. `work_for` gives what a job of so many ranks runs; only one program is run if
    they are more than cores. Raises MachineError with what a job said if it fails."""
    cores = len(cores_of_this_process())
    rates, load = [], []
    crowded = {cores + 1, ranks} if ranks > cores else ()
    for started in (*range(1, min(ranks, cores) + 1), *sorted(crowded)):
        work = work_for(started)
        on_phase(f"measure passes of {counted(started, 'rank')} at once, on {counted(cores, 'core')}")
        began_s, before_s = _others_s()
        rates.append(_job(work, started))
        ended_s, after_s = _others_s()
        load.append(max(after_s - before_s, 0.0) / max(ended_s - began_s, 1e-9))
    on_phase("measure memory and products")
    source, target = torch.ones(_COPY_BYTES // 4), torch.ones(_COPY_BYTES // 4)
    copy_bytes_per_s = 2 * _COPY_BYTES / _least_s(lambda: target.copy_(source))
    square = torch.ones(_GEMM_SIZE, _GEMM_SIZE)
    gemm_flops_per_s = 2.0 * _GEMM_SIZE**3 / _least_s(lambda: torch.mm(square, square))
    return Machine(cores, available_bytes() or 0, copy_bytes_per_s, gemm_flops_per_s, max(load), tuple(rates))


def _others_s() -> tuple[float, float]:
    """The time, and how long other programs have used the cores, children that this process waited for aside."""
    user, nice, system, _, _, irq, soft_irq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy_s = (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return times.elapsed, busy_s - (times.user + times.system + times.children_user + times.children_system)


def _job(work: Work, ranks: int) -> Rates:
    launcher = [] if ranks == 1 else [str(mpirun_here()), "-np", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _WORK).write_bytes(pickle.dumps(work))
        command = [*launcher, sys.executable, "-m", "sambasim.runtime.measure.machine", folder]
        printed, last = ran(*command, longest_s=_TIMEOUT_S)
        if printed is None:
            error = Path(folder) / _ERROR
            said = error.read_text() if error.exists() else last
            what = f"the model cannot be measured on this machine, with {counted(ranks, 'rank')}: {said}"
            remedy = "a smaller --global-batch, or fewer --ranks; sambasim compile and sambasim run say more"
            raise MachineError(what, remedy=remedy)
        rates: Rates = pickle.loads((Path(folder) / _RATES).read_bytes())
        return rates


def _least_s(action: Callable[[], object]) -> float:
    with process.repeatable(threads=1):
        return min(timeit.repeat(action, number=1, repeat=9))


_LEAST_STEPS, _MOST_STEPS, _ENOUGH_S = 4, 20, 1.5
"""Steps of each number of samples: as many as fit into `_ENOUGH_S`, within these bounds (estimate)."""

_SHORT_BYTES, _LONG_BYTES, _MESSAGES = 64, 4 * MIB, 15


def _resident_bytes() -> tuple[int, int, int]:
    """The pages of this process in memory: its own, those of files, as of libraries, and of shared memory."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    sizes = {words[0]: int(words[1]) * KIB for words in lines if words and words[0].startswith("Rss")}
    return sizes["RssAnon:"], sizes["RssFile:"], sizes["RssShmem:"]


class _Clock(StepObserver):
    """Notes when instructions are called: a node takes until the next call, with what is stored and freed behind it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def bind(self, replica: int, node: Node, function: Function) -> Function:
        name, note = node.name, self.calls

        def timed(*operands: object, **keywords: object) -> object:
            note.append((name, perf_counter_ns()))
            return function(*operands, **keywords)

        return timed

    def seconds(self, ended_ns: int) -> dict[str, float]:
        """Of the nodes called since the last time."""
        calls = pairwise([*self.calls, ("", ended_ns)])
        seconds = {name: (stop_ns - called_ns) / 1e9 for (name, called_ns), (_, stop_ns) in calls}
        self.calls.clear()
        return seconds


def _batches(
    source: Source, program: Program, options: DataOptions, communicator: Communicator
) -> Iterator[Mapping[str, Tensor]]:
    """Batches of `source`, epoch after epoch."""
    ranks, size = communicator.world_size, program.batch_size
    of_epoch = len(source.train) // ranks // size
    if not of_epoch:
        what = f"{source.name} has {len(source.train):,} samples to train on"
        fewer = f"fewer than {counted(ranks, 'replica')} × {counted(size, 'sample')}"
        raise DataError(f"{what}, {fewer}", remedy="a smaller --global-batch")
    cut = {"rank": communicator.rank, "world_size": ranks, "batch_size": size, "accumulation_steps": 1}
    shard = Shard(source.train, **cut, options=options, shapes=Shapes([input_specs(program)], {}), seed=0)

    def batch(number: int) -> Mapping[str, Tensor]:
        if number % of_epoch == 0:
            shard.begin_epoch(number // of_epoch, number)
        return shard.next_batch()

    return map(batch, count())


class _Step(NamedTuple):
    """The seconds of one step: of its batch, of a pass by node, of a pass that adds, and of the update."""

    batch_s: float
    seconds: Mapping[str, float]
    adding_pass_s: float
    update_s: float

    @property
    def pass_s(self) -> float:
        return sum(self.seconds.values())


def _replica(
    program: Program, work: Work, source: Source, communicator: Communicator, way: Way, private_bytes: int
) -> tuple[PassTimes, float]:
    """Collective. The times of passes of this rank, as a replica of `program` with synced gradients, and of its update.
    `private_bytes`: the memory of this process without one."""
    batches, clock, steps = _batches(source, program, work.data, communicator), _Clock(), list[_Step]()
    (transport,) = open_ranks(program, communicator, way, _fill)
    memory, tangent = transport.memory, tangent_of(program, 1.0)
    arguments = bind_arguments(program, work.optimizer, communicator.world_size, communicator.rank, 0)
    executor = Executor(
        program.step, program, memory.tensor, wanted=[program.loss or ""], transport=transport, observer=clock
    )
    update = Update(executor, transport, Optimizers(transport.sync.memory, arguments))

    def step() -> None:
        update.begin_step(len(steps) + 1, 1.0)
        began_s = perf_counter()
        place_inputs(memory, next(batches))
        batch_s = perf_counter() - began_s
        finished(executor.run(tangent))
        written = clock.seconds(perf_counter_ns())
        finished(executor.run(tangent, accumulate=True))
        added = clock.seconds(perf_counter_ns())
        communicator.barrier()  # so that the update waits for nobody
        began_s = perf_counter()
        finished(update.run([0.0]))
        steps.append(_Step(batch_s, written, sum(added.values()), perf_counter() - began_s))

    began_s = perf_counter()
    step()  # finds out how passes write gradients
    each_s = max(communicator.all_gather_object(perf_counter() - began_s))
    for _ in range(max(_LEAST_STEPS, min(_MOST_STEPS, round(_ENOUGH_S / each_s)))):
        step()
    heap_bytes = _resident_bytes()[0] - private_bytes
    if communicator.world_size == 1:
        heap_bytes -= program.device_bytes
    del steps[0]
    typical = _usual(sorted(steps, key=lambda step: step.pass_s))
    nodes = [node.name for section in executor.sections for node in program.step.section_nodes(section)]
    seconds = {name: typical.seconds.get(name, 0.0) for name in nodes}  # 0 for what is evaluated once
    adding_s = _usual(sorted(step.adding_pass_s for step in steps)) - typical.pass_s
    batch_s = _usual(sorted(step.batch_s for step in steps))
    update_s = _usual(sorted(step.update_s for step in steps))
    return PassTimes(program.batch_size, seconds, max(adding_s, 0.0), batch_s, max(heap_bytes, 0)), update_s


def _fill(memory: DeviceMemory, rank: int) -> None:
    """Small random parameters, and ones elsewhere, by which operators may divide: times do not depend on more."""
    for name, symbol in memory.program.symbols.items():
        if symbol.offset is None or not symbol.type.dtype.startswith(("float", "bfloat")):
            continue
        if symbol.kind is SymbolKind.PARAMETER and memory.has_own_parameters:
            memory.tensor(name).normal_(0.0, 0.02)
        elif symbol.kind in (SymbolKind.BUFFER, SymbolKind.CONSTANT):
            memory.tensor(name).fill_(1.0)


def _usual(ascending: Sequence[T]) -> T:
    """The lower quartile: other programs on the machine make some times longer, and none shorter."""
    return ascending[len(ascending) // 4]


def _measure(work: Work, communicator: Communicator) -> Rates:
    """Collective."""
    keep_freed_memory()
    ranks = communicator.world_size
    with process.repeatable(default_threads(communicator, 1)):
        if ranks > 1:
            process.bring_up(communicator)
        importlib.import_module("sambasim.runtime.job")  # what a rank of a run has in memory
        process.seed_everything(0)
        source = open_source(work.data, tuple(input_specs(work.programs[0])))
        private_bytes, _, shared_bytes = _resident_bytes()
        passes, update_s, host_update_s = [], 0.0, 0.0
        enough = [program for program in work.programs if program.batch_size * ranks <= len(source.train)]
        for program in enough or work.programs[:1]:
            way = Way.DEVICE if ranks > 1 else Way.IN_PROCESS
            times, update_s = _replica(program, work, source, communicator, way, private_bytes)
            passes.append(times)
        if 1 < ranks <= len(cores_of_this_process()):
            way = Way.HOST_REPLICATED
            _, host_update_s = _replica(work.programs[0], work, source, communicator, way, private_bytes)
        latency_s, link_bytes_per_s = _link(communicator)
        _, file_bytes, _ = _resident_bytes()  # with the kernels of all operators
        if ranks > 1:
            process.take_down()
    return Rates(
        ranks=ranks,
        private_bytes=private_bytes,
        shared_bytes=shared_bytes + file_bytes,
        passes=tuple(passes),
        update_s=update_s,
        host_update_s=host_update_s,
        latency_s=latency_s,
        link_bytes_per_s=link_bytes_per_s,
    )


def _link(communicator: Communicator) -> tuple[float, float]:
    """Collective. The seconds of a short message between ranks 0 and 1, and the bytes a second of a long one."""
    if communicator.world_size == 1:
        return 0.0, inf
    group = MessageGroup(communicator)

    def message_s(size_bytes: int) -> float:
        tensor, type_ = torch.zeros(size_bytes // 4), TensorType("float32", (size_bytes // 4,))
        times_s = []
        for _ in range(_MESSAGES):
            communicator.barrier()
            began_s = perf_counter()
            if group.position == 0:
                group.send(1, 0).begin(tensor)
                group.recv(1, 1, type_).finish()
            elif group.position == 1:
                group.recv(0, 0, type_).finish()
                group.send(0, 1).begin(tensor)
            times_s.append((perf_counter() - began_s) / 2)  # there and back
        return communicator.broadcast_object(_usual(sorted(times_s)))

    latency_s, long_s = map(message_s, (_SHORT_BYTES, _LONG_BYTES))
    return latency_s, _LONG_BYTES / max(long_s - latency_s, 1e-9)


def main(folder: Path) -> None:
    communicator = connect_ranks(sys.argv)
    try:
        # Written by the process that started this one, into a folder that no other account can read.
        rates = _measure(pickle.loads((folder / _WORK).read_bytes()), communicator)
    except SambasimError as error:
        (folder / _ERROR).write_text(error.what)
        communicator.abort(2)
    if communicator.rank == 0:
        (folder / _RATES).write_bytes(pickle.dumps(rates))
    communicator.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
