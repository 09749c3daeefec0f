"""A replica whose caller passes each batch and chooses the sections to run on it: FWD, BCKWD, OPT or all at once.

OPT is the whole update, with REDUCE, GRADNORM and GATHER. Each OPT names its sync path; before the first, device memory
is private.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from sambasim.errors import InternalError, OptionError
from sambasim.ir.graph import Graph, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.device import SHARED_KINDS, DeviceMemory
from sambasim.runtime.executor import Executor, Tangent
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.replica import place_inputs
from sambasim.runtime.tracing import SectionClock
from sambasim.runtime.transports.base import BytesMoved, Transport, slices_of
from sambasim.runtime.transports.factory import Allocated, Way, allocate, connect
from sambasim.runtime.transports.in_process import finished

STEP = frozenset({SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT})


class Mode(StrEnum):
    """How a replica syncs its gradients with the others."""

    ALONE = "alone"
    HOST = "host"
    DEVICE = "device"


class StepwiseReplica:
    """The replica of this rank. Creating it is collective, and so is an OPT in a mode other than ALONE."""

    def __init__(self, program: Program, communicator: Communicator) -> None:
        self._program = program
        self._communicator = communicator
        self._allocated = allocate(program, communicator, Way.IN_PROCESS)
        self._mode: Mode | None = None
        self._hyperparameters: dict[int, Mapping[str, float | bool]] = {}
        self._executor = Executor(self._graph, program, self._memory.tensor)
        self._transport: Transport | None = None
        self._optimizers: Optimizers | None = None
        self._begun = False  # whether the step has begun, before its first gradient is overwritten
        self._unused_backwards = 0
        self._loss = 0.0
        self._members = program.optimizer_states
        self.steps = 0
        self._clock: SectionClock | None = None

    @property
    def clock(self) -> SectionClock | None:
        """Times the sections of whole steps and of FWD alone. With a clock, the update begins after the backward."""
        return self._clock

    @clock.setter
    def clock(self, clock: SectionClock | None) -> None:
        self._clock = clock
        self._executor.observe(clock)

    @property
    def _memory(self) -> DeviceMemory:
        return self._allocated.memories[0]

    @property
    def mode(self) -> Mode | None:
        return self._mode

    @property
    def bytes_moved(self) -> BytesMoved:
        return BytesMoved() if self._transport is None else self._transport.bytes_moved

    def run(
        self, kinds: Collection[SectionKind], inputs: Mapping[str, Tensor], tangent: Tangent, mode: Mode
    ) -> Mapping[str, Tensor]:
        """Run the sections of `kinds`; returns the outputs of FWD and the gradients of inputs of BCKWD, by symbol.
        `tangent`: what a backward starts from; `mode`: how an OPT syncs, the same on all ranks. Raises OptionError for
        a BCKWD without a forward."""
        if SectionKind.FWD in kinds:
            place_inputs(self._memory, inputs)
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
        if self._optimizers is not None:
            self._optimizers.change(optimizer, hyperparameters)

    def run_graph(self, graph: Graph) -> None:
        """From the next forward on, run `graph`, the training graph with other constants."""
        self._program = replace(self._program, training=graph)
        self._executor.replace_pass(graph)

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
                    self.write(symbol.name, torch.zeros(()).expand(symbol.type.shape))
        self.steps = self._unused_backwards = 0

    def meet(self) -> None:
        """Wait for the other replicas of the node, if they share what `write` writes."""
        if self._sliced:
            self._communicator.node_barrier()

    def write(self, symbol: str, value: Tensor) -> None:
        """Set `symbol` to `value`; the first rank of a node writes what it shares. Call `meet` before and after."""
        if self._program.symbols[symbol].kind in SHARED_KINDS and not self._memory.has_own_parameters:
            return
        place = self._memory.tensor(symbol)
        if symbol in self._members and self._sliced:
            group, member, _ = self._members[symbol]
            slices = slices_of(self._program, self._communicator.world_size)[group.name]
            start, stop = slices[self._communicator.rank]
            low, high = max(start, member.start) - member.start, min(stop, member.start + member.numel) - member.start
            if low < high:
                place.view(-1)[low:high].copy_(value.flatten()[low:high])
        else:
            place.copy_(value)

    def read(self, symbol: str) -> Tensor:
        """A copy of the whole `symbol`. Raises OptionError for a state of which another node has a part."""
        devices = self._allocated.devices
        if symbol not in self._members or not self._sliced:
            return self._memory.tensor(symbol).clone()
        group, member, state = self._members[symbol]
        if self._communicator.topology.node_count > 1:
            raise OptionError(
                f"{symbol} is in slices on {self._communicator.topology.node_count} nodes, and cannot be read here",
                remedy="sync through the host where optimizer state is to be saved: leave out --reduce-on-rdu",
            )
        whole = torch.empty_like(self._memory.tensor(symbol))
        flat = whole.view(-1)
        for rank, (start, stop) in enumerate(slices_of(self._program, self._communicator.world_size)[group.name]):
            low, high = max(start, member.start), min(stop, member.start + member.numel)
            if low < high:
                region = devices[0].by_rank[rank].region(group, state)
                flat[low - member.start : high - member.start].copy_(region[low:high])
        return whole

    @property
    def _sliced(self) -> bool:
        """Whether each rank has only its own slices of the optimizer's state."""
        return any(one.shares_parameters for one in self._allocated.devices)

    @property
    def _graph(self) -> Graph:
        return self._program.training or self._program.evaluation

    def _forward(self) -> dict[str, Tensor]:
        if self._clock is None:
            return self._executor.forward()
        self._clock.begin([section for section in self._graph.sections if section.kind is SectionKind.FWD])
        outputs = self._executor.forward()
        self._clock.end()
        return outputs

    def _whole_step(self, tangent: Tangent, mode: Mode) -> Mapping[str, Tensor]:
        self._begin_update(mode)
        clock = self._clock
        if clock is not None:
            clock.begin(self._graph.sections)
        outputs = finished(self._executor.run_pass(tangent, last=clock is None))
        self._note_loss(outputs)
        self._finish_update()
        if clock is not None:
            clock.end()
        return outputs

    def _backward(self, tangent: Tangent) -> dict[str, Tensor]:
        if not self._executor.awaits_backward:
            raise OptionError("there is no forward whose backward could be run", remedy="run section FWD first")
        if self._transport is not None:
            self._begin_step()
        gradients = self._executor.backward(tangent, accumulate=self._unused_backwards > 0)
        self._unused_backwards += 1
        return gradients

    def _optimize(self, mode: Mode) -> None:
        if not self._unused_backwards:
            raise OptionError("there are no gradients that an optimizer could use", remedy="run section BCKWD first")
        self._begin_update(mode)
        self._finish_update()

    def _begin_update(self, mode: Mode) -> None:
        optimizers = self._enter(mode)
        if self._begun:  # hyperparameters may have been changed since
            optimizers.begin(self.steps + 1, 1.0)
        self._begin_step()

    def _begin_step(self) -> None:
        """Wait until other ranks have read the gradients that are overwritten next; once for each step."""
        if not self._begun:
            self._executor.begin_step(self.steps + 1, 1.0)
            self._begun = True

    def _finish_update(self) -> None:
        self.steps += 1
        finished(self._executor.update([self._loss]))
        self._begun = False
        self._unused_backwards = 0

    def _note_loss(self, outputs: Mapping[str, Tensor]) -> None:
        if self._program.loss is not None:
            self._loss = float(outputs[self._program.loss].mean())

    def _enter(self, mode: Mode) -> Optimizers:
        """Connect the replicas by `mode`; the first call moves device memory to where it needs it."""
        if self._optimizers is not None:
            if mode is not self._mode:
                raise OptionError(
                    f"gradients were synced in the mode {self._mode}, and now are to be in the mode {mode}",
                    remedy="give session.run the same data_parallel= and reduce_on_rdu= in every step",
                )
            return self._optimizers
        program, communicator = self._program, self._communicator
        if program.training is None:
            raise InternalError("an optimizer step of a program without one")
        self._mode = mode
        way = _WAYS[mode]
        if way is Way.DEVICE:
            self._move(allocate(program, communicator, way))
        (self._transport,) = connect(communicator, way, self._allocated)
        arguments = {argument.name: argument.default for argument in program.runtime_arguments}
        self._optimizers = Optimizers(program, self._memory, arguments)
        for index, hyperparameters in self._hyperparameters.items():
            self._optimizers.change(index, hyperparameters)
        if way is Way.DEVICE:
            memory, transport, optimizers = self._memory.tensor, self._transport, self._optimizers
            self._executor = Executor(self._graph, program, memory, transport=transport, optimizers=optimizers)
            self._executor.observe(self._clock)
        else:
            self._executor.bind_update(self._transport, self._optimizers)
        return self._optimizers

    def _move(self, allocated: Allocated) -> None:
        """Move device memory, with its values, to `allocated`. The first rank of a node writes what the node shares."""
        before = self._memory
        self._allocated = allocated
        for symbol in self._program.symbols.values():
            if symbol.offset is None or symbol.kind is SymbolKind.REDUCE_BUFFER:
                continue
            if symbol.kind is SymbolKind.OPTIMIZER_STATE and not self.steps:
                continue  # still zero, as new memory is
            self.write(symbol.name, before.tensor(symbol.name))
        self._communicator.node_barrier()


_WAYS = {Mode.ALONE: Way.IN_PROCESS, Mode.HOST: Way.HOST_REPLICATED, Mode.DEVICE: Way.DEVICE}
