"""A replica whose caller passes each batch and chooses the sections to run on it: FWD, BCKWD, OPT or all at once.

OPT is the whole update, with REDUCE, GRADNORM and GATHER. Each OPT names its sync path; before the first, device memory
is private.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from sambasim.errors import InternalError, OptionError
from sambasim.ir.graph import Graph, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.schedule import ActionKind
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.executor import Executor, Steps, Tangent
from sambasim.runtime.engine.update import Update
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.replica_memory import ReplicaMemory
from sambasim.runtime.transports.communication import BytesMoved
from sambasim.runtime.transports.connect import Way, connect, connect_here
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import SectionClock

R = TypeVar("R")

STEP = frozenset({SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT})


class Mode(StrEnum):
    """How a replica syncs its gradients with the others."""

    ALONE = "alone"
    HOST = "host"
    DEVICE = "device"


class StepwiseReplica:
    """The replica of this process, which runs all of its ranks. Creating it is collective, and so is an OPT in a mode
    other than ALONE."""

    def __init__(self, program: Program, communicator: Communicator) -> None:
        self._communicator = communicator
        self._memory = ReplicaMemory(program, communicator)
        self._program = self._memory.program
        self._mode: Mode | None = None  # before the first OPT
        self._hyperparameters: dict[int, Mapping[str, float | bool]] = {}
        self._transports = connect_here(self._memory.updating)
        self._executors = self._bound()
        self._updates: Sequence[Update] = ()  # of the ranks that have a transport
        self._begun = False  # whether the step has begun, before its first gradient is overwritten
        self._unused_backwards = 0
        self._loss = 0.0
        self.steps = 0
        self._clock: SectionClock | None = None

    @property
    def clock(self) -> SectionClock | None:
        """Times the sections of whole steps and of FWD alone. With a clock, the update begins after the backward."""
        return self._clock

    @clock.setter
    def clock(self, clock: SectionClock | None) -> None:
        self._clock = clock
        self._observe()

    def _observe(self) -> None:
        for executor in self._executors:
            executor.observer = self._clock
        for update in self._updates:
            update.observe(self._clock)

    @property
    def mode(self) -> Mode | None:
        return self._mode

    @property
    def bytes_moved(self) -> BytesMoved:
        counts = [transport.sync.bytes_moved.counts() for transport in self._transports]
        return BytesMoved(*map(sum, zip(*counts, strict=True)))

    def run(
        self, kinds: Collection[SectionKind], inputs: Mapping[str, Tensor], tangent: Tangent, mode: Mode
    ) -> Mapping[str, Tensor]:
        """Run the sections of `kinds`; returns the outputs of FWD and the gradients of inputs of BCKWD, by symbol.
        `tangent`: what a backward starts from; `mode`: how an OPT syncs, the same on all ranks. Raises OptionError for
        a BCKWD without a forward."""
        if SectionKind.FWD in kinds:
            self._memory.place(inputs)
        if STEP.issubset(kinds) and not self._unused_backwards:
            return self._whole_step(tangent, mode)
        outputs: dict[str, Tensor] = {}
        if SectionKind.FWD in kinds:
            outputs = self._forward()
            self._note_loss(outputs)
        if SectionKind.BCKWD in kinds:
            outputs |= self._backward(tangent)
        if SectionKind.OPT in kinds:
            self._optimize(mode)
        return outputs

    def change(self, optimizer: int, hyperparameters: Mapping[str, float | bool]) -> None:
        """Set hyperparameters of optimizer number `optimizer` from the next OPT on."""
        self._hyperparameters[optimizer] = {**self._hyperparameters.get(optimizer, {}), **hyperparameters}
        for update in self._updates:
            update.optimizers.change(optimizer, hyperparameters)

    def run_graph(self, graph: Graph) -> None:
        """From the next forward on, run `graph`, the training graph with other constants."""
        self._program = replace(self._program, training=graph)
        self._executors = self._bound()
        self._observe()

    @property
    def loss(self) -> float:
        """The mean of the loss, or of its substitute, in the last forward."""
        return self._loss

    @property
    def hyperparameters(self) -> Mapping[int, Mapping[str, float | bool]]:
        return self._hyperparameters

    def forget(self) -> None:
        """Reset the optimizers and discard gradients."""
        if self.steps:  # before the first step, states are zero and their pages untouched
            for symbol in self._program.symbols.values():
                if symbol.kind is SymbolKind.OPTIMIZER_STATE:
                    self.write(symbol.name, torch.zeros(()).expand(symbol.whole.shape))
        self.steps = self._unused_backwards = 0

    def meet(self) -> None:
        """Wait for the other replicas of the node, if they share what `write` writes."""
        if self._memory.is_sliced:
            self._communicator.node_barrier()

    def write(self, symbol: str, value: Tensor) -> None:
        """Set `symbol` to `value`; the first process of a node writes what it shares. Call `meet` before and after."""
        self._memory.write(symbol, value)

    def read(self, symbol: str) -> Tensor:
        """A copy of the whole `symbol`. Raises OptionError for a state of which another node has a part."""
        return self._memory.read(symbol, unreduced=self._unused_backwards > 0)

    @property
    def _graph(self) -> Graph:
        return self._program.leading

    def _bound(self) -> list[Executor]:
        """An executor for each rank. Of chips, the first has the only transport."""
        pairs = zip_longest(self._memory.memories, self._transports)
        return [Executor(self._graph, self._program, memory.tensor, transport=transport) for memory, transport in pairs]

    def _together(self, steps: Sequence[Steps[R]]) -> list[R]:
        hub = self._transports[0].hub
        try:
            return run_together(steps, hub)
        except BaseException:  # an app may go on with another batch
            if hub is not None:
                hub.forget()
            raise

    def _outputs(self, passes: Sequence[Steps[list[dict[str, Tensor]]]]) -> list[dict[str, Tensor]]:
        """Of each rank."""
        return [outputs for (outputs,) in self._together(passes)]

    def _forward(self) -> dict[str, Tensor]:
        if self._clock is not None:
            forward = [section for section in self._graph.sections if section.kind is SectionKind.FWD]
            self._clock.begin(forward, self._memory.ranks)
        outputs = self._outputs([executor.run(only=ActionKind.FORWARD) for executor in self._executors])
        if self._clock is not None:
            self._clock.end()
        return self._memory.joined(outputs)

    def _whole_step(self, tangent: Tangent, mode: Mode) -> Mapping[str, Tensor]:
        self._begin_update(mode)
        clock = self._clock
        if clock is not None:
            clock.begin(self._graph.sections, self._memory.ranks)
        # Gradients of chips are reduced after all have run.
        updates = self._updates if clock is None and self._memory.chips == 1 else ()
        tangents = self._memory.tangents(tangent)
        of_ranks = self._outputs(
            [
                executor.run(start, last=True, overlapping=update.overlapping if update else ())
                for executor, start, update in zip_longest(self._executors, tangents, updates)
            ]
        )
        outputs = self._memory.joined(of_ranks, self._executors[0].input_gradients)
        self._note_loss(outputs)
        self._finish_update()
        if clock is not None:
            clock.end()
        return outputs

    def _backward(self, tangent: Tangent) -> dict[str, Tensor]:
        first, adds = self._executors[0], self._unused_backwards > 0
        if not first.awaits_backward:
            raise OptionError("there is no forward whose backward could be run", remedy="run section FWD first")
        if self._mode is not None:
            self._begin_step()
        tangents = zip(self._executors, self._memory.tangents(tangent), strict=True)
        passes = [executor.run(start, accumulate=adds, only=ActionKind.BACKWARD) for executor, start in tangents]
        outputs = self._outputs(passes)
        self._unused_backwards += 1
        return self._memory.joined(outputs, first.input_gradients)

    def _optimize(self, mode: Mode) -> None:
        if not self._unused_backwards:
            raise OptionError("there are no gradients that an optimizer could use", remedy="run section BCKWD first")
        self._begin_update(mode)
        self._finish_update()

    def _begin_update(self, mode: Mode) -> None:
        self._enter(mode)
        if self._begun:  # hyperparameters may have been changed since
            for update in self._updates:
                update.optimizers.begin(self.steps + 1, 1.0)
        self._begin_step()

    def _begin_step(self) -> None:
        """Wait until other ranks have read the gradients that are overwritten next; once for each step."""
        if not self._begun:
            for update in self._updates:
                update.begin_step(self.steps + 1, 1.0)
            self._begun = True

    def _finish_update(self) -> None:
        self.steps += 1
        self._memory.reduce_chips()
        self._together([update.run([self._loss]) for update in self._updates])
        self._begun = False
        self._unused_backwards = 0

    def _note_loss(self, outputs: Mapping[str, Tensor]) -> None:
        if self._program.loss is not None:
            self._loss = float(outputs[self._program.loss].mean())

    def _enter(self, mode: Mode) -> None:
        """Connect the replicas by `mode`; the first call moves device memory to where it needs it."""
        if self._mode is not None:
            if mode is not self._mode:
                raise OptionError(
                    f"gradients were synced in the mode {self._mode}, and now are to be in the mode {mode}",
                    remedy="give session.run the same data_parallel= and reduce_on_rdu= in every step",
                )
            return
        program, memory = self._program, self._memory
        if program.training is None:
            raise InternalError("an optimizer step of a program without one")
        self._mode = mode
        if mode is not Mode.ALONE:
            allocated = memory.connect_replicas(_WAYS[mode], keep_states=self.steps > 0)
            self._transports = connect(self._communicator, _WAYS[mode], allocated, mesh=memory.mesh)
            if mode is Mode.DEVICE or memory.lies_along_tp:
                self._executors = self._bound()
        arguments = {argument.name: argument.default for argument in program.runtime_arguments}
        self._updates = [
            Update(executor, transport, Optimizers(program, transport.sync.memory, arguments))
            for executor, transport in zip(self._executors, self._transports, strict=False)
        ]
        for index, hyperparameters in self._hyperparameters.items():
            for update in self._updates:
                update.optimizers.change(index, hyperparameters)
        self._observe()


_WAYS = {Mode.HOST: Way.HOST_REPLICATED, Mode.DEVICE: Way.DEVICE}
