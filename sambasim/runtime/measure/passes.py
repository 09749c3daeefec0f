"""A job of `measure/machine.py`: every rank runs real passes of a replica at the same time, and times what it calls.

It reads what to run from a file in a folder of its own, and writes what rank 0 has measured there.

    python -m sambasim.runtime.measure.passes FOLDER
"""

import importlib
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import TypeVar

import torch
from torch import Tensor

from sambasim.data.sources import Source, open_source
from sambasim.errors import DataError, SambasimError
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Node
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.options.training import DataOptions, OptimizerOptions
from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.engine.update import Update
from sambasim.runtime.machine import torch_process_group
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.determinism import repeatable, seed_everything
from sambasim.runtime.machine.mpi import connect as connect_ranks
from sambasim.runtime.machine.resources import cores_of_this_process, default_threads, keep_freed_memory
from sambasim.runtime.run.replica import Shard, input_specs
from sambasim.runtime.transports.connect import Way, open_ranks
from sambasim.runtime.transports.in_process import finished
from sambasim.runtime.transports.messages import MessageGroup
from sambasim.runtime.values.memory import DeviceMemory
from sambasim.runtime.values.optimizers import Optimizers, bind_arguments
from sambasim.runtime.watch.observer import Function, StepObserver
from sambasim.simulation.machine import PassTimes, Rates
from sambasim.units import KIB, MIB, counted

T = TypeVar("T")

WORK, RATES, ERROR = "work.pickle", "rates.json", "error.txt"
"""The files of a job, in its folder."""

_LEAST_STEPS, _MOST_STEPS, _ENOUGH_S = 4, 20, 1.5
"""Steps of each number of samples: as many as fit into `_ENOUGH_S`, within these bounds (estimate)."""

_SHORT_BYTES, _LONG_BYTES, _MESSAGES = 64, 4 * MIB, 15


@dataclass(frozen=True, slots=True)
class Resident:
    """The pages of a process in memory: its own, those of files, as of libraries, and of shared memory."""

    private_bytes: int
    file_bytes: int
    shared_bytes: int


def resident() -> Resident:
    """Of this process."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    sizes = {words[0]: int(words[1]) * KIB for words in lines if words and words[0].startswith("Rss")}
    return Resident(sizes["RssAnon:"], sizes["RssFile:"], sizes["RssShmem:"])


@dataclass(frozen=True, slots=True)
class Work:
    """What a job runs: the program of a replica for each number of samples, and its data and optimizer."""

    programs: tuple[Program, ...]
    data: DataOptions
    optimizer: OptimizerOptions


class _Clock(StepObserver):
    """Notes when each instruction of a pass is called: a node takes the time until the next one is called, with what is
    stored and freed behind it."""

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
        stops = [*(called_ns for _, called_ns in self.calls[1:]), ended_ns]
        seconds = {
            name: (stop_ns - called_ns) / 1e9 for (name, called_ns), stop_ns in zip(self.calls, stops, strict=True)
        }
        self.calls.clear()
        return seconds


class _Batches:
    """Batches of `source`, epoch after epoch."""

    def __init__(self, source: Source, program: Program, options: DataOptions, communicator: Communicator) -> None:
        ranks, size = communicator.world_size, program.batch_size
        self._each = len(source.train) // ranks // size
        if not self._each:
            raise DataError(
                f"{source.name} has {len(source.train):,} samples to train on, fewer than"
                f" {counted(ranks, 'replica')} × {counted(size, 'sample')}",
                remedy="a smaller --global-batch",
            )
        self._shard = Shard(
            source.train,
            rank=communicator.rank,
            world_size=ranks,
            batch_size=size,
            accumulation_steps=1,
            options=options,
            inputs=input_specs(program),
            seed=0,
        )
        self._read = 0

    def next(self) -> Mapping[str, Tensor]:
        epoch, within = divmod(self._read, self._each)
        if not within:
            self._shard.begin_epoch(epoch, self._read)
        self._read += 1
        return self._shard.next_batch()


@dataclass(frozen=True, slots=True)
class _Step:
    """The seconds of one step: of its batch, of a pass by node, of all of a pass that adds, and of the update."""

    batch_s: float
    seconds: Mapping[str, float]
    adding_pass_s: float
    update_s: float


class _Rank:
    """This rank of a job, as a replica of `program` with synced gradients."""

    def __init__(self, program: Program, work: Work, batches: _Batches, communicator: Communicator, way: Way) -> None:
        self._communicator, self._batches = communicator, batches
        way = Way.IN_PROCESS if communicator.world_size == 1 else way
        (transport,) = open_ranks(program, communicator, way, _fill)
        self._memory = transport.memory
        arguments = bind_arguments(program, work.optimizer, communicator.world_size, communicator.rank, 0)
        self._clock = _Clock()
        self._executor = Executor(
            program.step, program, self._memory.tensor, wanted=program.loss, transport=transport, observer=self._clock
        )
        self._update = Update(self._executor, transport, Optimizers(program, transport.sync.memory, arguments))
        self._tangent, self._steps = tangent_of(program, 1.0), 0

    def step(self) -> _Step:
        self._steps += 1
        executor, memory = self._executor, self._memory
        self._update.begin_step(self._steps, 1.0)
        began_s = perf_counter()
        for name, tensor in self._batches.next().items():
            memory.tensor(name).copy_(tensor)
        batch_s = perf_counter() - began_s
        finished(executor.run(self._tangent))
        written = self._clock.seconds(perf_counter_ns())
        finished(executor.run(self._tangent, accumulate=True))
        added = self._clock.seconds(perf_counter_ns())
        self._communicator.barrier()  # so that the update waits for nobody
        began_s = perf_counter()
        finished(self._update.run([0.0]))
        return _Step(batch_s, written, sum(added.values()), perf_counter() - began_s)


def _fill(memory: DeviceMemory, rank: int) -> None:
    """Small random parameters, and ones elsewhere, by which operators may divide: times do not depend on more."""
    for name, symbol in memory.program.symbols.items():
        if symbol.offset is None or not symbol.type.dtype.startswith(("float", "bfloat")):
            continue
        if symbol.kind is SymbolKind.PARAMETER and memory.has_own_parameters:
            memory.tensor(name).normal_(0.0, 0.02)
        elif symbol.kind in (SymbolKind.BUFFER, SymbolKind.CONSTANT):
            memory.tensor(name).fill_(1.0)


def _steps_of(rank: _Rank, communicator: Communicator) -> Sequence[_Step]:
    """Collective. As many steps on all ranks, after one that finds out how passes write gradients."""
    began_s = perf_counter()
    rank.step()
    each_s = max(communicator.all_gather_object(perf_counter() - began_s))
    count = max(_LEAST_STEPS, min(_MOST_STEPS, round(_ENOUGH_S / each_s)))
    return [rank.step() for _ in range(count)]


def _times(program: Program, steps: Sequence[_Step], heap_bytes: int) -> PassTimes:
    graph = program.step
    nodes = [node.name for section in pass_and_update(graph)[0] for node in graph.section_nodes(section)]
    by_pass_s = sorted((sum(step.seconds.values()), at) for at, step in enumerate(steps))
    pass_s, at = _usual(by_pass_s)
    seconds = {name: steps[at].seconds.get(name, 0.0) for name in nodes}  # 0 for what is evaluated once
    adding_s = _usual(sorted(step.adding_pass_s for step in steps)) - pass_s
    batch_s = _usual(sorted(step.batch_s for step in steps))
    return PassTimes(program.batch_size, seconds, max(adding_s, 0.0), batch_s, heap_bytes)


def _usual(ascending: Sequence[T]) -> T:
    """The lower quartile: other programs on the machine make some times longer, and none shorter."""
    return ascending[len(ascending) // 4]


def _measure(work: Work, communicator: Communicator) -> Rates:
    """Collective."""
    keep_freed_memory()
    threads, ranks = default_threads(communicator, 1), communicator.world_size
    with repeatable(threads):
        if ranks > 1:
            torch_process_group.bring_up(communicator)
        importlib.import_module("sambasim.runtime.job")  # what a rank of a run has in memory
        seed_everything(0)
        source = open_source(work.data, tuple(input_specs(work.programs[0])))
        before = resident()
        passes, update_s, host_update_s = [], 0.0, 0.0
        enough = [program for program in work.programs if program.batch_size * ranks <= len(source.train)]
        for program in enough or work.programs[:1]:
            rank = _Rank(program, work, _Batches(source, program, work.data, communicator), communicator, Way.DEVICE)
            steps = _steps_of(rank, communicator)
            heap_bytes = resident().private_bytes - before.private_bytes
            if ranks == 1:
                heap_bytes -= program.device_bytes
            passes.append(_times(program, steps, max(heap_bytes, 0)))
            update_s = _usual(sorted(step.update_s for step in steps))
            del rank
        if 1 < ranks <= len(cores_of_this_process()):
            first = work.programs[0]
            rank = _Rank(
                first, work, _Batches(source, first, work.data, communicator), communicator, Way.HOST_REPLICATED
            )
            host_update_s = _usual(sorted(step.update_s for step in _steps_of(rank, communicator)))
        latency_s, link_bytes_per_s = _link(communicator)
        file_bytes = resident().file_bytes  # with the kernels of all operators
        if ranks > 1:
            torch_process_group.take_down()
    return Rates(
        ranks=ranks,
        threads=threads,
        private_bytes=before.private_bytes,
        shared_bytes=before.shared_bytes + file_bytes,
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
    latency_s, long_s = (_message_s(group, communicator, size) for size in (_SHORT_BYTES, _LONG_BYTES))
    return latency_s, _LONG_BYTES / max(long_s - latency_s, 1e-9)


def _message_s(group: MessageGroup, communicator: Communicator, size_bytes: int) -> float:
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


def main(folder: Path) -> None:
    communicator = connect_ranks(sys.argv)
    try:
        # Written by the process that started this one, into a folder that no other account can read.
        rates = _measure(pickle.loads((folder / WORK).read_bytes()), communicator)
    except SambasimError as error:
        (folder / ERROR).write_text(error.what)
        communicator.abort(2)
    if communicator.rank == 0:
        (folder / RATES).write_text(json.dumps(asdict(rates)))
    communicator.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
