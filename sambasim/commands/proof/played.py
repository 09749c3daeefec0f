"""A PEF as anyone would run it: one replica, whose ranks this process plays in turn."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.errors import LARGEST_FACTOR
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, TENSOR, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.ranks import first_holders, in_slices, ranks_of_groups
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.executor import IN_MEMORY, Executor
from sambasim.runtime.engine.update import Update
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.machine.process import Stream, derive, seed_torch
from sambasim.runtime.transports.connect import Way, open_ranks
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, joined, place_inputs, place_weights
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import StepObserver

Batch: TypeAlias = Mapping[str, Tensor]
Outputs: TypeAlias = Mapping[str, Tensor]

_UNCLIPPED = LARGEST_FACTOR

_MOST_UPDATED = 20_000_000  # parameters


def seed_of(step: int, chip: int, micro_batch: int) -> int:
    """By which a pass draws random numbers, here and in eager PyTorch."""
    return derive(0, chip, step, micro_batch, Stream.GRAPH)


def _seed(step: int, chip: int, micro_batch: int) -> None:
    seed_torch(seed_of(step, chip, micro_batch))


class Played:
    """One replica of `program` with `weights`, whose updates do not clip. For ZeRO 2 and 3 there are two, with the same
    batches: the mean of their gradients has the bits of each. `updates`: an optimizer step is played too; of many
    parameters only where ranks exchange gradients in it. Raises MachineError if there is too little memory."""

    def __init__(self, program: Program, weights: Mapping[str, Tensor], observer: StepObserver | None = None) -> None:
        self.program = program
        members = [member for group in program.groups for member in group.members]
        self.updates = program.ranks_of_replica > 1 or sum(member.numel for member in members) <= _MOST_UPDATED
        replicas = 2 if program.zero >= 2 and program.training is not None else 1  # then a pass has nodes of its own
        count = program.ranks_of_replica * replicas
        self._mesh = mesh_of(program.mesh, count)
        of_a_replica = in_slices(program) if replicas > 1 else program
        self._read_only: Mapping[str, Tensor] = {}
        if count == 1 and not self.updates:
            self._read_only = {member.parameter: weights[member.parameter] for member in members}
            weights = {name: tensor for name, tensor in weights.items() if name not in self._read_only}

        def fill(memory: DeviceMemory, rank: int) -> None:
            place_weights(memory, weights, self._mesh.coordinates(rank))

        self._transports = open_ranks(of_a_replica, single_rank("here"), Way.IN_PROCESS, fill, range(count), self._mesh)
        self._hub = self._transports[0].hub
        names = (argument.name for argument in program.runtime_arguments)
        unclipped = {name: _UNCLIPPED for name in names if name.endswith(("__max_grad_norm", "__max_grad_value"))}
        self._steps = list[tuple[Executor, Update]]()
        for transport in self._transports:
            own, read = transport.program, partial(self._tensor, transport.memory)
            if own.training is not None:
                executor = Executor(own.training, own, read, transport=transport, observer=observer)
                update = Update(executor, transport, Optimizers(transport.sync.memory, unclipped))
                self._steps.append((executor, update))
        groups = ranks_of_groups(program)
        self._holders = dict(first_holders(program)) | {
            member.gradient: groups[group.name] for group in program.groups for member in group.members
        }
        self._ranks = [self._mesh.ranks_of(chip) for chip in range(program.chips)]
        """Of each chip, in the first replica."""
        self._updates = 0

    def forward_and_backward(self, batches: Sequence[Sequence[Batch]], number: int) -> Sequence[Sequence[Outputs]]:
        """The outputs of step `number` by symbol; `batches` has the micro-batches of each chip."""
        program, count = self.program, self.program.micro_batches
        types = [(name, program.symbols[name].type) for name in program.names_of(SymbolKind.TANGENT)]
        tangents = {name: torch.full(of.shape, 1 / count, dtype=getattr(torch, of.dtype)) for name, of in types}
        passes = []
        for rank, (executor, update) in enumerate(self._steps):
            update.begin_step(self._updates + 1, 1.0)
            chip = self._mesh.coordinate(rank, DATA_PARALLEL) % program.chips
            own, seed = batches[chip], partial(_seed, number, chip)
            placed = program.names_of(SymbolKind.ARGUMENT) if program.schedule else own[0]
            place_inputs(self._transports[rank].memory, {name: own[0][name] for name in placed})
            own = IN_MEMORY if program.schedule is None else own
            passes.append(executor.run(tangents, own, seed, last=True, overlapping=update.overlapping))
        outputs = run_together(passes, self._hub)
        return [
            [self._joined({rank: outputs[rank][at] for rank in ranks}) for at in range(count)] for ranks in self._ranks
        ]

    def update(self) -> None:
        """The rest of a step. Gradients stay as they were reduced."""
        self._updates += 1
        run_together([update.run((0.0,)) for _, update in self._steps], self._hub)

    def evaluate(self, batch: Batch, seed: int) -> Outputs:
        """What the evaluation graph gives, on the first chip."""
        passes = []
        for rank in self._ranks[0]:
            transport = self._transports[rank]
            own, read = transport.memory.program, partial(self._tensor, transport.memory)
            place_inputs(transport.memory, batch)
            passes.append(Executor(own.evaluation, own, read, transport=transport).run())
        seed_torch(seed)
        of_ranks = run_together(passes, self._hub)
        return self._joined({rank: outputs for rank, (outputs,) in zip(self._ranks[0], of_ranks, strict=True)})

    def read(self, symbol: str, chip: int = 0) -> Tensor:
        """The whole tensor of `symbol` that a chip has: a view, or a copy of one that is cut."""
        at, holder = self._mesh.coordinate, self._holders[symbol]
        held = [self._transports[rank].memory for rank in self._ranks[chip] if at(rank, PIPELINE) == holder]
        return joined([self._tensor(memory, symbol) for memory in held], self.program.symbols[symbol].cuts)

    def _tensor(self, memory: DeviceMemory, symbol: str) -> Tensor:
        return self._read_only[symbol] if symbol in self._read_only else memory.tensor(symbol)

    def _joined(self, of_ranks: Mapping[int, Outputs]) -> Outputs:
        """The outputs of a chip, from those of its ranks: whole, of the last stage that has them."""
        whole = {}
        for rank, outputs in of_ranks.items():  # in the order of stages
            peers = self._mesh.group(rank, TENSOR)
            for name in outputs if rank == peers[0] else ():
                whole[name] = joined([of_ranks[peer][name] for peer in peers], self.program.symbols[name].cuts)
        return whole
