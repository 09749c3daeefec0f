"""A replica whose caller passes each batch and chooses the sections to run on it: FWD, BCKWD, OPT or all at once.

OPT is the whole update, with REDUCE, GRADNORM and GATHER. Each OPT names its sync path; before the first, device memory
is private. A process runs every rank of its replica. They lie along the axis tp, each with parts of the weights; or
they are chips that share the batch: then all read the parameters of the first, which alone updates them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.ir.graph import Graph, SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.ranks import with_cut_batch
from sambasim.ir.schedule import ActionKind
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.engine.executor import Executor, Tangent
from sambasim.runtime.engine.update import Update
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.process import check_node_memory
from sambasim.runtime.transports.communication import mean_of
from sambasim.runtime.transports.connect import Allocated, Transport, Way, allocate, connect, connect_here, groups_of
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.transports.window import is_small
from sambasim.runtime.values.mean import tree_mean
from sambasim.runtime.values.memory import SHARED_KINDS, DeviceMemory, joined, part_of, place_inputs, slices_of
from sambasim.runtime.values.optimizers import Begun, Optimizers
from sambasim.runtime.watch.observer import SectionClock

STEP = frozenset({SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT})

_WEIGHTS = (SymbolKind.PARAMETER, SymbolKind.BUFFER)


class _Memory:
    """The device memories of a replica, `of_ranks` in order. `program`: as one rank executes it."""

    def __init__(self, program: Program, communicator: Communicator) -> None:
        self.chips, self.ranks = program.chips, program.ranks_of_replica
        self.lies_along_tp = self.ranks > self.chips
        self.program = with_cut_batch(program, self.chips)
        self._communicator = communicator
        self._axis = DATA_PARALLEL if self.chips > 1 else TENSOR
        self._states = program.optimizer_states
        self._allocated = allocate(self.program, communicator, Way.IN_PROCESS, range(self.ranks // self.chips))
        others = self.chips - 1
        if others:
            check_node_memory(communicator, program.device_bytes * others)
        self._other_chips = [DeviceMemory.private(self.program) for _ in range(others)]
        self._collect()

    def _collect(self) -> None:
        self.updating = self._allocated.memories
        """Of the ranks that update parameters: all, or the first chip."""
        shared = [memory.with_parameters_of(self.updating[0]) for memory in self._other_chips]
        self.of_ranks = [*self.updating, *shared]

    @property
    def is_sliced(self) -> bool:
        """Whether each process has only its own slices of the optimizer's state."""
        return bool(self._allocated.devices) and not is_small(self.program, self._allocated.groups[0])

    def connect(self, way: Way, kept_states: Collection[str]) -> Sequence[Transport]:
        """Collective. Connect the replicas by `way`, with memory where it needs it. The first process of a node writes
        what the node shares. Of the optimizer states, `kept_states` are moved; the others are zero."""
        communicator, before, count = self._communicator, self.updating, len(self.updating)
        ranks = range(communicator.rank * count, (communicator.rank + 1) * count)
        mesh = mesh_of(self.program.mesh, communicator.world_size * self.ranks) if self.lies_along_tp else None
        if way is Way.DEVICE:
            self._allocated = allocate(self.program, communicator, way, ranks, mesh)
            self._collect()
            for symbol in self.program.symbols.values():
                is_kept = symbol.kind is not SymbolKind.OPTIMIZER_STATE or symbol.name in kept_states
                if symbol.offset is not None and symbol.kind is not SymbolKind.REDUCE_BUFFER and is_kept:
                    for rank, memory in enumerate(before):
                        self._write(symbol, rank, memory.tensor(symbol.name))
            communicator.node_barrier()
        else:
            self._allocated = Allocated(before, groups_of(communicator, ranks, mesh))
        return connect(communicator, way, self._allocated, mesh=mesh)

    def share(self, other: "_Memory") -> bool:
        """Read the parameters and buffers of `other`, if its ranks hold the same parts; returns whether they do."""
        held = [
            {(one.name, one.type, one.cuts) for one in of.symbols.values() if one.kind in _WEIGHTS}
            for of in (self.program, other.program)
        ]
        if held[0] != held[1] or self.ranks != other.ranks:
            return False
        for own, others in zip(self.of_ranks, other.of_ranks, strict=True):
            own.take({name: others.tensor(name) for name, *_ in held[0]})
        return True

    def place(self, inputs: Mapping[str, Tensor]) -> None:
        """Copy a batch to the ranks."""
        for rank, memory in enumerate(self.of_ranks):
            place_inputs(memory, self._parts(inputs, rank))

    def meet(self) -> None:
        """Wait for the other replicas, if they share what `write` writes, or still receive it from this node."""
        if self.is_sliced:
            self._communicator.barrier()

    def write(self, name: str, value: Tensor) -> None:
        """Set `name` to `value`; the first process of a node writes what it shares. Call `meet` before and after."""
        symbol = self.program.symbols[name]
        for rank in range(self.ranks):
            self._write(symbol, rank, part_of(value, symbol.cuts, {self._axis: rank}))

    def read(self, name: str, *, unreduced: bool) -> Tensor:
        """A copy of the whole of the symbol `name`. `unreduced`: each chip has its own gradients."""
        symbol = self.program.symbols[name]
        if unreduced and self.chips > 1 and symbol.kind is SymbolKind.GRADIENT:
            return mean_of([memory.tensor(name) for memory in self.of_ranks])
        ranks = range(self.ranks if symbol.cuts else 1)
        return joined([self._read(name, rank) for rank in ranks], symbol.cuts)

    def joined(self, of_ranks: Sequence[dict[str, Tensor]], of_inputs: Collection[str]) -> dict[str, Tensor]:
        """The outputs of the replica, from those of its ranks. `of_inputs`: gradients of inputs, which chips compute of
        their own means."""
        outputs = {}
        for name in of_ranks[0]:
            parts, cuts = [own[name] for own in of_ranks], self.program.symbols[name].cuts
            whole = mean_of(parts) if self.chips > 1 and not cuts else joined(parts, cuts)
            outputs[name] = whole / self.chips if cuts and name in of_inputs else whole
        return outputs

    def tangents(self, tangent: Tangent) -> Sequence[Tangent]:
        """What the backward of each rank starts from. The gradient of a replica is the mean over its chips."""
        if self.chips == 1 or tangent is None:
            return [tangent] * self.ranks
        symbols = self.program.symbols
        only = next(name for name, symbol in symbols.items() if symbol.kind is SymbolKind.TANGENT)
        by_name = tangent if isinstance(tangent, dict) else {only: tangent}
        scaled = {name: whole * self.chips if symbols[name].cuts else whole for name, whole in by_name.items()}
        of_ranks = [self._parts(scaled, rank) for rank in range(self.ranks)]
        return of_ranks if isinstance(tangent, dict) else [parts[only] for parts in of_ranks]

    def reduce_chips(self) -> None:
        """Replace the gradients of the first chip by the means over all."""
        if self.chips > 1:
            for group in self.program.groups:
                gradients = [memory.region(group, "gradient") for memory in self.of_ranks]
                tree_mean(gradients, gradients[0], self.chips)()

    def _parts(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        symbols = self.program.symbols
        return {name: part_of(tensor, symbols[name].cuts, {self._axis: rank}) for name, tensor in tensors.items()}

    def _slices(self, name: str) -> Iterator[tuple[int, int, int]]:
        """Each replica that has a part of an optimizer state, and where it begins and ends in the parameter."""
        group, member, _ = self._states[name]
        slices = slices_of(self.program, self._communicator.world_size)[group.name]
        for replica, (start, stop) in enumerate(slices):
            low, high = max(start - member.start, 0), min(stop - member.start, member.numel)
            if low < high:
                yield replica, low, high

    def _write(self, symbol: Symbol, rank: int, value: Tensor) -> None:
        memory = self.of_ranks[rank]
        if symbol.kind in SHARED_KINDS and not memory.has_own_parameters:
            return
        if symbol.kind is SymbolKind.OPTIMIZER_STATE and rank >= len(self.updating):
            return  # this chip updates nothing
        place = memory.tensor(symbol.name)
        if symbol.name not in self._states or not self.is_sliced:
            place.copy_(value)
            return
        for replica, low, high in self._slices(symbol.name):
            if replica == self._communicator.rank:
                place.view(-1)[low:high].copy_(value.flatten()[low:high])

    def _read(self, name: str, rank: int) -> Tensor:
        place = self.of_ranks[rank].tensor(name)
        if name not in self._states or not self.is_sliced:
            return place.clone()
        group, member, state = self._states[name]
        if self._communicator.node_count > 1:
            raise OptionError(
                f"{name} is in slices on {self._communicator.node_count} nodes, and cannot be read here",
                remedy="sync through the host where optimizer state is to be saved: leave out --reduce-on-rdu",
            )
        whole = torch.empty_like(place)
        for replica, low, high in self._slices(name):
            region = self._allocated.devices[rank][replica].region(group, state)
            whole.view(-1)[low:high].copy_(region[member.start + low : member.start + high])
        return whole


class StepwiseReplica:
    """The replica of this process, which runs all of its ranks. Creating it is collective, and so is an OPT in a mode
    but IN_PROCESS. `loss`: the mean of the loss, or of its substitute, in the last forward; `hyperparameters`: what
    `change` has set, by optimizer; `mode`: None before the first OPT; `begun`: whoever writes states adds their
    optimizer; `write`, `meet`, `place`: those of its memory. `weights_of`: another replica that predicts with the same
    model; its parameters and buffers are read."""

    def __init__(
        self, program: Program, communicator: Communicator, weights_of: "StepwiseReplica | None" = None
    ) -> None:
        self._memory = _Memory(program, communicator)
        self.has_weights_of_another = weights_of is not None and self._memory.share(weights_of._memory)
        self._program = self._memory.program
        self.write, self.meet, self.place = self._memory.write, self._memory.meet, self._memory.place
        self.mode: Way | None = None
        self.hyperparameters: dict[int, Mapping[str, float | bool]] = {}
        self._transports = connect_here(self._memory.updating)
        self._executors = self._bound()
        self._updates: Sequence[Update] = ()  # of the ranks that have a transport
        self._begun = False  # whether the step has begun, before its first gradient is overwritten
        self._unused_backwards = 0
        self.loss = 0.0
        self.steps = 0
        self.begun: Begun = {}
        self._clock: SectionClock | None = None

    def time_by(self, clock: SectionClock | None) -> None:
        """Time the sections of whole steps and of FWD alone. With a clock, the update begins after the backward."""
        self._clock = clock
        self._observe()

    def _observe(self) -> None:
        for executor in self._executors:
            executor.observer = self._clock
        for update in self._updates:
            update.observe(self._clock)

    def run(
        self, kinds: Collection[SectionKind], inputs: Mapping[str, Tensor], tangent: Tangent, mode: Way
    ) -> Mapping[str, Tensor]:
        """Run the sections of `kinds`; returns the outputs of FWD and the gradients of inputs of BCKWD, by symbol.
        `tangent`: what a backward starts from; `mode`: how an OPT syncs, the same on all ranks. Raises OptionError for
        a BCKWD without a forward."""
        is_whole = STEP.issubset(kinds) and not self._unused_backwards
        outputs: dict[str, Tensor] = {}
        if SectionKind.FWD in kinds:
            self._memory.place(inputs)
            if is_whole:
                self._begin_update(mode)
            clock = self._clock
            if clock is not None:
                sections = self._program.leading.sections
                timed = [section for section in sections if is_whole or section.kind is SectionKind.FWD]
                clock.begin(timed, self._memory.ranks)
            outputs = self._pass(tangent) if is_whole else self._pass(only=ActionKind.FORWARD)
            if self._program.loss is not None:
                self.loss = float(outputs[self._program.loss].mean())
            if is_whole:
                self._finish_update()
            if clock is not None:
                clock.end()
        if is_whole:
            return outputs
        if SectionKind.BCKWD in kinds:
            if not all(executor.awaits_backward for executor in self._executors):
                raise OptionError("there is no forward whose backward could be run", remedy="run section FWD first")
            if self.mode is not None:
                self._begin_step()
            outputs |= self._pass(tangent, ActionKind.BACKWARD)
            self._unused_backwards += 1
        if SectionKind.OPT in kinds:
            if not self._unused_backwards:
                what = "there are no gradients that an optimizer could use"
                raise OptionError(what, remedy="run section BCKWD first")
            self._begin_update(mode)
            self._finish_update()
        return outputs

    def change(self, optimizer: int, hyperparameters: Mapping[str, float | bool]) -> None:
        """Set hyperparameters of optimizer number `optimizer` from the next OPT on."""
        self.hyperparameters[optimizer] = {**self.hyperparameters.get(optimizer, {}), **hyperparameters}
        for update in self._updates:
            update.optimizers.change(optimizer, hyperparameters)

    def use_graph(self, graph: Graph) -> None:
        """Use `graph` from the next forward on: the training graph with other numbers, such as the dropout rates that
        an app gives. A forward that waits for its backward is forgotten."""
        if self._program.training is None:
            self._program = replace(self._program, evaluation=graph)
        else:
            self._program = replace(self._program, training=graph)
        self._executors = self._bound()  # updates stay: their sections are the same
        self._observe()

    def forget(self) -> None:
        """Reset the optimizers and discard gradients."""
        for name in self.states_of(self.begun):  # the pages of others are untouched
            self.write(name, torch.zeros(()).expand(self._program.symbols[name].whole.shape))
        self.begun.clear()
        self.steps = self._unused_backwards = 0

    def states_of(self, optimizers: Collection[int]) -> list[str]:
        """The symbols of the states of these optimizers."""
        states = self._program.optimizer_states.items()
        return [name for name, (group, *_) in states if group.optimizer in optimizers]

    def read(self, symbol: str) -> Tensor:
        """A copy of the whole `symbol`. Raises OptionError for a state of which another node has a part."""
        return self._memory.read(symbol, unreduced=self._unused_backwards > 0)

    def _bound(self) -> list[Executor]:
        """An executor for each rank. Of chips, the first has the only transport."""
        program, pairs = self._program, zip_longest(self._memory.of_ranks, self._transports)
        return [Executor(program.leading, program, memory.tensor, transport=transport) for memory, transport in pairs]

    def _pass(self, tangent: Tangent = None, only: ActionKind | None = None) -> dict[str, Tensor]:
        """The outputs of a pass, or of one kind of its actions `only`."""
        adds = only is ActionKind.BACKWARD and self._unused_backwards > 0
        # With a clock, nothing overlaps; gradients of chips are reduced after all have run.
        updates = self._updates if only is None and self._clock is None and self._memory.chips == 1 else ()
        starts = zip_longest(self._executors, self._memory.tangents(tangent), updates)
        passes = [
            executor.run(
                start, accumulate=adds, last=only is None, overlapping=update.overlapping if update else (), only=only
            )
            for executor, start, update in starts
        ]
        of_ranks: list[dict[str, Tensor]] = [outputs for (outputs,) in run_together(passes, self._transports[0].hub)]
        return self._memory.joined(of_ranks, self._executors[0].input_gradients)

    def _begin_update(self, mode: Way) -> None:
        if self.mode is None:
            self._connect(mode)
        elif mode is not self.mode:
            raise OptionError(
                f"the sync of gradients was {self.mode}, and is now to be {mode}",
                remedy="give session.run the same data_parallel= and reduce_on_rdu= in every step",
            )
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
        run_together([update.run([self.loss]) for update in self._updates], self._transports[0].hub)
        self._begun = False
        self._unused_backwards = 0

    def _connect(self, mode: Way) -> None:
        """Connect the replicas by `mode`, and move device memory to where it needs it."""
        self.mode = mode
        if mode is not Way.IN_PROCESS:
            self._transports = self._memory.connect(mode, self.states_of(self.begun))
            if mode is Way.DEVICE or self._memory.lies_along_tp:
                self._executors = self._bound()
        optimizers = (Optimizers(rank.sync.memory, begun=self.begun) for rank in self._transports)
        self._updates = [*map(Update, self._executors, self._transports, optimizers)]
        for index, hyperparameters in self.hyperparameters.items():
            self.change(index, hyperparameters)
        self._observe()
