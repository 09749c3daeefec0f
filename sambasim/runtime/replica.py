"""One replica: a copy of the model and its training steps on its own shard of the data."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.program import Program
from sambasim.ir.slices import Slice
from sambasim.ir.types import SymbolKind
from sambasim.options.grammar import InputSpec
from sambasim.options.training import TrainingOptions
from sambasim.records.trace import Track
from sambasim.runtime.determinism import Stream, derive, seed_torch
from sambasim.runtime.device import SHARED_KINDS, DeviceMemory
from sambasim.runtime.executor import Executor, Steps, Updated, tangent_of
from sambasim.runtime.observer import StepObserver
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.parts import part_of
from sambasim.runtime.sharding import Shard
from sambasim.runtime.transports.base import BYTE_COUNTS, Transport

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor


class Replica:
    """Rank `rank` of a run with `seed`, a replica or one part of it. `shard`: its data; None for a parameter server
    without a replica. `overlaps`: communication may overlap with the backward. `skips_nonfinite`: skip a step if a loss
    is not finite."""

    def __init__(
        self,
        rank: int,
        program: Program,
        memory: DeviceMemory,
        shard: Shard | None,
        training: TrainingOptions,
        transport: Transport,
        optimizers: Optimizers,
        engine: "Inductor | None" = None,
        *,
        overlaps: bool = True,
        skips_nonfinite: bool = False,
        observer: StepObserver | None = None,
    ) -> None:
        if program.training is None or program.loss is None:
            raise InternalError("a replica of a program without a training step")
        self.rank = rank
        self.replica = transport.replica  # ranks of one replica read the same data and draw the same numbers
        self.memory = memory
        self.transport = transport
        self.optimizers = optimizers
        self.observer: StepObserver | None = None
        self._detailed: StepObserver | None = None  # the same, if it wants details
        self._shard = shard
        self._seed, self._micro_steps = training.seed, training.accumulation_steps
        self._loss = program.loss
        self._program = program
        kinds = program.symbols
        self._inputs = {name: memory.tensor(name) for name in kinds if kinds[name].kind is SymbolKind.INPUT}
        self.executor = Executor(
            program.training,
            program,
            memory.tensor,
            engine,
            program.loss,
            transport=transport,
            optimizers=optimizers,
            replica=rank,
            overlaps=overlaps and not skips_nonfinite,
            observer=observer,
        )
        self._guard = _Buffers(program, memory) if skips_nonfinite else None
        self._tangents: dict[float, Tensor | None] = {}

    def observe(self, observer: StepObserver | None) -> None:
        self.observer = observer
        self._detailed = observer if observer is not None and observer.detailed else None
        self.executor.observe(observer)

    @property
    def loss_dtype(self) -> str:
        return self._program.symbols[self._loss].type.dtype

    @property
    def shard(self) -> Shard:
        """Its part of the data. Raises InternalError for a parameter server without a replica."""
        if self._shard is None:
            raise InternalError("the data of a rank that has no replica")
        return self._shard

    @property
    def works(self) -> bool:
        """Whether it computes gradients; False for a parameter server without a replica."""
        return self._shard is not None

    def step(
        self, step: int, update: int, rate: float, loss_scale: float, request: Callable[[], int]
    ) -> Steps[Updated]:
        """Run step `step` (from 0) with optimizer step `update` (from 1, without skipped ones); `rate` multiplies the
        learning rates, `loss_scale` the loss of each backward. `request` is called after the passes: what this rank
        asks of the run."""
        guard, detailed, exchanged = self._guard, self._detailed, None
        if guard is not None:
            guard.save()
            self.transport.wait_for_readers()
        elif detailed is not None:
            self._observed_begin(detailed, update, rate, loss_scale)
        else:
            self.executor.begin_step(update, rate, loss_scale)
        passes = self._passes if self._program.schedule is None else self._pipelined
        losses = (yield from passes(self._shard, step, loss_scale)) if self._shard is not None else []
        ended_ns, asked = perf_counter_ns(), request()
        if guard is not None:  # exchange the losses before any gradient is reduced
            exchanged = yield from self.executor.exchange(losses, asked, ended_ns)
            if not all(map(math.isfinite, exchanged.losses)):
                guard.restore()
                return exchanged._replace(applied=False)
            self.executor.begin_step(update, rate, loss_scale)
            asked = exchanged.request
        if detailed is None:
            updated = yield from self.executor.update(losses, asked, ended_ns)
        else:
            updated = yield from self._observed_update(detailed, losses, asked, ended_ns)
        if exchanged is None:
            return updated
        exposed_s = updated.exposed_s + exchanged.exposed_s
        return updated._replace(began_ns=exchanged.began_ns, exposed_s=exposed_s, waited_s=exchanged.waited_s)

    def _observed_begin(self, observer: StepObserver, update: int, rate: float, loss_scale: float) -> None:
        began_ns = perf_counter_ns()
        observer.span_begins(self.rank, Track.HOST, "begin step")
        self.executor.begin_step(update, rate, loss_scale)
        observer.span_ends(self.rank, Track.HOST, "begin step", began_ns, {})

    def _observed_update(
        self, observer: StepObserver, losses: Sequence[float], request: int, ended_ns: int
    ) -> Steps[Updated]:
        before, began_ns = self.transport.bytes_moved.counts(), perf_counter_ns()
        observer.span_begins(self.rank, Track.HOST, "sync and update")
        updated = yield from self.executor.update(losses, request, ended_ns)
        moved = [now - then for now, then in zip(self.transport.bytes_moved.counts(), before, strict=True)]
        args = {name: count for name, count in zip(BYTE_COUNTS, moved, strict=True) if count}
        observer.span_ends(self.rank, Track.HOST, "sync and update", began_ns, args)
        return updated

    def _passes(self, shard: Shard, step: int, loss_scale: float) -> Steps[Sequence[float]]:
        """Forward and backward on the next batches. Each backward starts from `loss_scale` divided by the micro-steps,
        so device memory then holds the scaled gradient of their mean. Returns a list with the mean loss."""
        observer, detailed = self.observer, self._detailed
        micro_steps = self._micro_steps
        scale = loss_scale / micro_steps
        if scale not in self._tangents:
            self._tangents[scale] = tangent_of(self._program, scale)
        began_ns, total = 0 if detailed is None else perf_counter_ns(), 0.0
        for micro_step in range(micro_steps):
            if observer is not None:
                observer.batch_begins(self.rank, micro_step)
            if detailed is None:
                for name, tensor in shard.next_batch().items():
                    self._inputs[name].copy_(tensor)
            else:
                self._observed_place(shard, detailed, micro_step)
            if observer is not None:
                observer.pass_begins(self.rank, micro_step)
            if self.executor.draws_random_numbers:
                self._seed_pass(step, micro_step)
            outputs = yield from self.executor.run_pass(
                self._tangents[scale],
                accumulate=micro_step > 0,
                last=micro_step == micro_steps - 1,
            )
            loss = float(outputs[self._loss])
            if observer is not None:
                observer.pass_ends(self.rank, loss)
            total += loss
        if detailed is not None:
            detailed.span_ends(self.rank, Track.HOST, "forward and backward", began_ns, {})
        return [total / micro_steps]

    def _pipelined(self, shard: Shard, step: int, loss_scale: float) -> Steps[Sequence[float]]:
        """`_passes` of a stage of a pipeline. Its loss is NaN where another rank has it."""
        observer, schedule = self.observer, self._program.schedule
        if schedule is None:
            raise InternalError("a pipeline without a schedule")
        micro_steps, count = self._micro_steps, schedule.micro_batches
        actions = schedule.rows[self.transport.mesh.coordinate(self.rank, PIPELINE)]
        scale = loss_scale / (micro_steps * count)
        if scale not in self._tangents:
            self._tangents[scale] = tangent_of(self._program, scale)
        losses: list[float] = []
        for micro_step in range(micro_steps):
            if observer is not None:
                observer.batch_begins(self.rank, micro_step)
            batches = [shard.next_batch() for _ in range(count)]
            if observer is not None:
                observer.pass_begins(self.rank, micro_step)
            outputs = yield from self.executor.run_schedule(
                actions,
                batches,
                self._tangents[scale],
                partial(self._seed_pass, step, micro_step * count),
                accumulate=micro_step > 0,
                last=micro_step == micro_steps - 1,
            )
            losses += [float(one[self._loss]) if self._loss in one else math.nan for one in outputs]
            if observer is not None:
                observer.pass_ends(self.rank, losses[-1])
        return [sum(losses) / len(losses)]

    def _seed_pass(self, step: int, first: int, number: int = 0) -> None:
        """Seed the generator for micro-batch `first` + `number` of a step: the same for all ranks of a replica."""
        seed_torch(derive(self._seed, self.replica, step, first + number, Stream.GRAPH))

    def _observed_place(self, shard: Shard, observer: StepObserver, micro_step: int) -> None:
        began_ns = perf_counter_ns()
        observer.span_begins(self.rank, Track.HOST, "data")
        batch = shard.next_batch()
        observer.span_ends(self.rank, Track.HOST, "data", began_ns, {"micro_step": micro_step})
        began_ns = perf_counter_ns()
        observer.span_begins(self.rank, Track.COPIES, "batch to device")
        for name, tensor in batch.items():
            self._inputs[name].copy_(tensor)
        moved = {"bytes": sum(tensor.nbytes for tensor in batch.values())}
        observer.span_ends(self.rank, Track.COPIES, "batch to device", began_ns, moved)


class _Buffers:
    """Copies of the buffers that a pass changes, to undo a skipped step."""

    def __init__(self, program: Program, memory: DeviceMemory) -> None:
        outputs = program.training.outputs if program.training is not None else ()
        names = [out.symbol for out in outputs if program.symbols[out.symbol].kind is SymbolKind.BUFFER]
        self._buffers = [(memory.tensor(name), memory.tensor(name).clone()) for name in names]

    def save(self) -> None:
        for buffer, kept in self._buffers:
            kept.copy_(buffer)

    def restore(self) -> None:
        for buffer, kept in self._buffers:
            buffer.copy_(kept)


def place_inputs(memory: DeviceMemory, batch: Mapping[str, Tensor]) -> None:
    for name, tensor in batch.items():
        memory.tensor(name).copy_(tensor)


_EMPTY: Mapping[str, Any] = MappingProxyType({})


def place_weights(
    program: Program,
    memory: DeviceMemory,
    weights: Mapping[str, Tensor],
    at: Mapping[str, int] = _EMPTY,
    keep: Mapping[str, Slice] = _EMPTY,
) -> None:
    """Copy parameters, buffers and constants into device memory, of what is cut the part of the rank with the
    coordinates `at`; optimizer states start as zeros. Parameters that lie in another replica's memory are skipped: that
    replica copies them; so is what other ranks of a pipeline hold. Of each group in `keep`, only that slice is kept."""
    group_of = {member.parameter: group for group in program.groups for member in group.members}
    for name, symbol in program.symbols.items():
        tensor = weights.get(name)
        if tensor is not None and (memory.has_own_parameters or symbol.kind not in SHARED_KINDS):
            memory.tensor(name).copy_(part_of(tensor, symbol.cuts, at))
            if name in group_of and group_of[name].name in keep:
                memory.releasing(group_of[name], "parameter", keep[group_of[name].name])()


def input_specs(program: Program) -> Sequence[InputSpec]:
    """The inputs of the program in order, for one sample each."""
    return [
        InputSpec(symbol.name, symbol.type.dtype, symbol.type.shape[1:], symbol.exclusive_bound)
        for symbol in program.symbols.values()
        if symbol.kind is SymbolKind.INPUT
    ]
