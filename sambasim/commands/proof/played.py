"""A PEF as anyone would run it: one replica, whose ranks this process plays in turn."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.ranks import first_holders, in_slices, ranks_of_groups
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.executor import IN_MEMORY, Executor, Steps
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

_UNCLIPPED = 1e300

_MOST_UPDATED = 20_000_000  # parameters


def seed_of(step: int, chip: int, micro_batch: int) -> int:
    """By which a pass draws random numbers, here and in eager PyTorch."""
    return derive(0, chip, step, micro_batch, Stream.GRAPH)


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
        arguments = {argument.name: argument.default for argument in program.runtime_arguments}
        arguments |= {name: _UNCLIPPED for name in arguments if name.endswith("__max_grad_norm")}
        self._executors, self._steps = list[Executor](), list[Update]()
        for transport in self._transports:
            own, read = transport.program, partial(self._tensor, transport.memory)
            if own.training is not None:
                executor = Executor(own.training, own, read, transport=transport, observer=observer)
                optimizers = Optimizers(own, transport.sync.memory, arguments)
                self._executors.append(executor)
                self._steps.append(Update(executor, transport, optimizers))
        groups = ranks_of_groups(program)
        self._holders = dict(first_holders(program)) | {
            member.gradient: groups[group.name] for group in program.groups for member in group.members
        }
        self._ranks = [self._mesh.ranks_of(chip) for chip in range(program.chips)]
        """Of each chip, in the first replica."""
        self._updates = 0

    def forward_and_backward(self, batches: Sequence[Sequence[Batch]], number: int) -> Sequence[Sequence[Outputs]]:
        """The outputs of step `number` by symbol; `batches` has the micro-batches of each chip."""
        symbols, micro_batches = self.program.symbols, self.program.micro_batches
        tangents = {
            name: torch.full(symbol.type.shape, 1 / micro_batches, dtype=getattr(torch, symbol.type.dtype))
            for name, symbol in symbols.items()
            if symbol.kind is SymbolKind.TANGENT
        }
        passes = []
        for rank, update in enumerate(self._steps):
            update.begin_step(self._updates + 1, 1.0)
            passes.append(self._pass(rank, batches[self._chip(rank)], tangents, number))
        outputs = run_together(passes, self._hub)
        return [
            [self._joined({rank: outputs[rank][at] for rank in ranks}) for at in range(micro_batches)]
            for ranks in self._ranks
        ]

    def update(self) -> None:
        """The rest of a step. Gradients stay as they were reduced."""
        self._updates += 1
        run_together([update.run((0.0,)) for update in self._steps], self._hub)

    def forget(self) -> None:
        """After an error: the next step begins anew."""
        if self._hub is not None:
            self._hub.forget()

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
        held = [rank for rank in self._ranks[chip] if self._stage(rank) == self._holders[symbol]]
        return self._whole(symbol, [self._tensor(self._transports[rank].memory, symbol) for rank in held])

    def _whole(self, symbol: str, parts: Sequence[Tensor]) -> Tensor:
        cuts = self.program.symbols[symbol].cuts
        return joined(parts, cuts[0]) if cuts else parts[0]

    def _tensor(self, memory: DeviceMemory, symbol: str) -> Tensor:
        return self._read_only[symbol] if symbol in self._read_only else memory.tensor(symbol)

    def _pass(
        self, rank: int, batches: Sequence[Batch], tangents: dict[str, Tensor], number: int
    ) -> Steps[Sequence[Outputs]]:
        chip = self._chip(rank)
        if self.program.schedule is None:
            place_inputs(self._transports[rank].memory, batches[0])
            batches = IN_MEMORY

        def seed(micro_batch: int) -> None:
            seed_torch(seed_of(number, chip, micro_batch))

        overlapping = self._steps[rank].overlapping
        return (yield from self._executors[rank].run(tangents, batches, seed, last=True, overlapping=overlapping))

    def _joined(self, of_ranks: Mapping[int, Outputs]) -> Outputs:
        """The outputs of a chip, from those of its ranks: whole, of the last stage that has them."""
        whole = {}
        for name in dict.fromkeys(name for outputs in of_ranks.values() for name in outputs):
            stage = max(self._stage(rank) for rank, outputs in of_ranks.items() if name in outputs)
            held = [outputs[name] for rank, outputs in of_ranks.items() if self._stage(rank) == stage]
            whole[name] = self._whole(name, held)
        return whole

    def _chip(self, rank: int) -> int:
        return self._mesh.coordinate(rank, DATA_PARALLEL) % self.program.chips

    def _stage(self, rank: int) -> int:
        return self._mesh.coordinate(rank, PIPELINE)
