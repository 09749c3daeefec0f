"""One replica: a copy of the model, and its training steps on its own shard."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.graph import Graph
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.grammar import InputSpec
from sambasim.records.trace import Track
from sambasim.runtime.device import SHARED_KINDS, DeviceMemory
from sambasim.runtime.executor import Executor, Steps, Updated, tangent_of
from sambasim.runtime.observer import SpanArgs, StepObserver, span
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.randomness import Stream, derive, seed_torch
from sambasim.runtime.sharding import Shard
from sambasim.runtime.transports.base import Transport

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor


class StepNumbers(NamedTuple):
    """Where in a run a step is.

    step: counts from 0
    update: the optimizer step that it makes, which counts from 1 and only what was applied
    rate: multiplies the learning rates
    micro_steps: passes of it
    """

    step: int
    update: int
    rate: float
    micro_steps: int


class Stepped(NamedTuple):
    """What came of a step: when its last pass ended, and whether it was applied to the parameters."""

    updated: Updated
    pass_ended_ns: int
    applied: bool = True


class Replica:
    """Replica `rank` of a run with `seed`, and how it communicates. A rank that only serves has no `shard`.

    engine: compiles its sections; without one they run as they are
    overlaps: whether communication may go on beside the backward
    skips_nonfinite: a step is applied only if the losses of all replicas are finite
    observer: binds the instructions of its passes
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        memory: DeviceMemory,
        shard: Shard | None,
        seed: int,
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
        self.rank = self.replica = rank
        self.memory = memory
        self.transport = transport
        self.optimizers = optimizers
        self.observer: StepObserver | None = None
        self._shard = shard
        self._seed = seed
        self._loss = program.loss
        self._program = program
        self._draws = draws_random_numbers(program.training)
        self._overlaps = overlaps and not skips_nonfinite
        self.executor = Executor(
            program.training,
            program,
            memory.tensor,
            engine,
            program.loss,
            transport=transport,
            optimizers=optimizers,
            replica=rank,
            observer=observer,
        )
        self._guard = _Buffers(program, memory) if skips_nonfinite else None
        self._tangents: dict[int, Tensor | None] = {}

    def observe(self, observer: StepObserver | None) -> None:
        """From now on, report to `observer`; to nobody, if it is None."""
        self.observer = observer
        self.executor.observe(observer)

    @property
    def shard(self) -> Shard:
        """Its part of the data. Raises InternalError for a rank that only serves."""
        if self._shard is None:
            raise InternalError("the data of a rank that has no replica")
        return self._shard

    @property
    def works(self) -> bool:
        """Whether it computes gradients, and does not only serve."""
        return self._shard is not None

    def step(self, numbers: StepNumbers, request: Callable[[], int]) -> Steps[Stepped]:
        """One step. `request` gives what this rank asks of the run, once the passes are over.

        Raises what reading a batch and executing the program do.
        """
        if self._guard is not None:
            return (yield from self._guarded_step(self._guard, numbers, request))
        self._begin_step(numbers)
        losses = (yield from self._passes(numbers)) if self.works else []
        ended_ns = perf_counter_ns()
        return Stepped((yield from self._updated(losses, request())), ended_ns)

    def _guarded_step(self, guard: "_Buffers", numbers: StepNumbers, request: Callable[[], int]) -> Steps[Stepped]:
        """A step that is applied only if all losses are finite, which all ranks learn before anything is reduced."""
        guard.keep()
        self.transport.wait_for_readers()
        losses = (yield from self._passes(numbers)) if self.works else []
        ended_ns = perf_counter_ns()
        told = yield from self.executor.told(losses, request())
        if not all(map(math.isfinite, told.losses)):
            guard.put_back()
            return Stepped(told, ended_ns, applied=False)
        self._begin_step(numbers)
        updated = yield from self._updated(losses, told.request)
        return Stepped(updated._replace(exposed_s=updated.exposed_s + told.exposed_s), ended_ns)

    def _updated(self, losses: Sequence[float], request: int) -> Steps[Updated]:
        observer = self.observer
        if observer is None:
            return (yield from self.executor.updated(losses, request))
        moved, began_ns = asdict(self.transport.bytes_moved), perf_counter_ns()
        observer.span_begins(self.rank, Track.HOST, "sync and update")
        updated = yield from self.executor.updated(losses, request)
        args = {f"{kind}_bytes": now - moved[kind] for kind, now in asdict(self.transport.bytes_moved).items()}
        args = {name: count for name, count in args.items() if count}
        observer.span_ends(self.rank, Track.HOST, "sync and update", began_ns, args)
        return updated

    @span(Track.HOST, "begin step")
    def _begin_step(self, numbers: StepNumbers) -> None:
        self.executor.begin_step(numbers.update, numbers.rate)

    def _passes(self, numbers: StepNumbers) -> Steps[Sequence[float]]:
        """Forward and backward on the next batches; the gradient of the mean over micro-steps is in device memory then:
        each backward starts from 1 / `micro_steps`. Returns the mean loss, alone in a list."""
        step, _, _, micro_steps = numbers
        if micro_steps not in self._tangents:
            self._tangents[micro_steps] = tangent_of(self._program, 1 / micro_steps)
        began_ns, total = perf_counter_ns(), 0.0
        for micro_step in range(micro_steps):
            self._place(self._read(micro_step))
            observer = self.observer
            if observer is not None:
                observer.pass_begins(self.rank, micro_step)
            if self._draws:
                seed_torch(derive(self._seed, self.rank, step, micro_step, Stream.GRAPH))
            outputs = yield from self.executor.passed(
                self._tangents[micro_steps],
                accumulate=micro_step > 0,
                last=self._overlaps and micro_step == micro_steps - 1,
            )
            loss = float(outputs[self._loss])
            if observer is not None:
                observer.pass_ends(self.rank, loss)
            total += loss
        if self.observer is not None:
            self.observer.span_ends(self.rank, Track.HOST, "forward and backward", began_ns, {})
        return [total / micro_steps]

    def _micro_step(self, micro_step: int) -> SpanArgs:
        return {"micro_step": micro_step}

    @span(Track.HOST, "data", _micro_step)
    def _read(self, micro_step: int) -> Mapping[str, Tensor]:
        return self.shard.next_batch()

    def _batch_bytes(self, batch: Mapping[str, Tensor]) -> SpanArgs:
        return {"bytes": sum(tensor.nbytes for tensor in batch.values())}

    @span(Track.COPIES, "batch to device", _batch_bytes)
    def _place(self, batch: Mapping[str, Tensor]) -> None:
        place_inputs(self.memory, batch)


class _Buffers:
    """The buffers that a pass changes, kept to be put back."""

    def __init__(self, program: Program, memory: DeviceMemory) -> None:
        outputs = program.training.outputs if program.training is not None else ()
        names = [out.symbol for out in outputs if program.symbols[out.symbol].kind is SymbolKind.BUFFER]
        self._buffers = [(memory.tensor(name), memory.tensor(name).clone()) for name in names]

    def keep(self) -> None:
        for buffer, kept in self._buffers:
            kept.copy_(buffer)

    def put_back(self) -> None:
        for buffer, kept in self._buffers:
            buffer.copy_(kept)


def draws_random_numbers(graph: Graph) -> bool:
    """Whether running `graph` advances torch's generator."""
    return any(OPERATORS[node.operator].draws_random_numbers for node in graph.nodes)


def place_inputs(memory: DeviceMemory, batch: Mapping[str, Tensor]) -> None:
    """Copy a batch to its place in device memory."""
    for name, tensor in batch.items():
        memory.tensor(name).copy_(tensor)


def place_weights(program: Program, memory: DeviceMemory, weights: Mapping[str, Tensor]) -> None:
    """Copy parameters, buffers and constants to their places; state of the optimizer begins as zeros.

    What lies in the memory of another replica is left to that one.
    """
    for name, tensor in weights.items():
        if memory.has_own_parameters or program.symbols[name].kind not in SHARED_KINDS:
            memory.tensor(name).copy_(tensor)


def input_specs(program: Program) -> Sequence[InputSpec]:
    """What the program takes in, for one sample each, in order."""
    return [
        InputSpec(symbol.name, symbol.type.dtype, symbol.type.shape[1:], symbol.exclusive_bound)
        for symbol in program.symbols.values()
        if symbol.kind is SymbolKind.INPUT
    ]
