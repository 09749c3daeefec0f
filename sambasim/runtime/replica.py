"""One replica: a copy of the model, and its forward and backward on its own shard."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.graph import Graph
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.inputs import InputSpec
from sambasim.records.trace import Track
from sambasim.runtime.device import SHARED_KINDS, DeviceMemory
from sambasim.runtime.executor import Executable, tangent_of
from sambasim.runtime.numerics.probe import Probe
from sambasim.runtime.randomness import Stream, derive, seed_torch
from sambasim.runtime.sharding import Shard
from sambasim.runtime.trace.watched import Args, Watched

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor


class Replica:
    """Replica `rank` of a run with `seed`. Its gradients are complete in `memory` after `differentiate`.

    `engine` compiles its sections; without one they run as they are. With `debug_numerics`, everything that they make
    is looked at, and its sync does not go on beside the backward.
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        memory: DeviceMemory,
        shard: Shard,
        seed: int,
        engine: "Inductor | None" = None,
        *,
        debug_numerics: bool = False,
    ) -> None:
        if program.training is None or program.loss is None:
            raise InternalError("a replica of a program without a training step")
        self.rank = rank
        self.memory = memory
        self.shard = shard
        self._seed = seed
        self._loss = program.loss
        self._program = program
        self._draws = draws_random_numbers(program.training)
        self._probe = Probe(rank, program, memory, shard.samples_of_last_batch) if debug_numerics else None
        look = self._probe.watched if self._probe else None
        self.executable = Executable(program.training, program, memory.tensor, engine, wanted=program.loss, look=look)
        self._tangents: dict[int, Tensor | None] = {}

    def differentiate(self, step: int, micro_steps: int, section_done: Callable[[int], None]) -> float:
        """Forward and backward on the next `micro_steps` batches; returns the mean loss.

        The gradient of the mean over micro-steps is in device memory: each backward starts from 1 / `micro_steps`. In
        the last of them, `section_done` is told after each section how many have been run. Raises what reading a batch
        and running the sections do; NumericsError with `debug_numerics`, if something is not finite.
        """
        if micro_steps not in self._tangents:
            self._tangents[micro_steps] = tangent_of(self._program, 1 / micro_steps)
        total = 0.0
        for micro_step in range(micro_steps):
            place_inputs(self.memory, self.shard.next_batch())
            if self._probe is not None:
                self._probe.begin(step, micro_step)
            if self._draws:
                seed_torch(derive(self._seed, self.rank, step, micro_step, Stream.GRAPH))
            outputs = self.executable.run(
                self._tangents[micro_steps],
                accumulate=micro_step > 0,
                section_done=section_done if micro_step == micro_steps - 1 and self._probe is None else _unheard,
            )
            loss = float(outputs[self._loss])
            if self._probe is not None:
                self._probe.end(loss)
            total += loss
        return total / micro_steps

    def watched(self) -> Sequence[Watched]:
        """What a trace shows of it, beside its sections."""
        return [
            Watched(self, "differentiate", Track.HOST, "forward and backward"),
            Watched(self.shard, "next_batch", Track.HOST, "data", batch_bytes),
        ]


def batch_bytes(batch: Mapping[str, Tensor], *call: object) -> Args:
    """The size of a batch, for a trace."""
    return {"bytes": sum(tensor.nbytes for tensor in batch.values())}


def _unheard(count: int) -> None:
    """Nobody waits for the sections of a micro-step to which others will add."""


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
