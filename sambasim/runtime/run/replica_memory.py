"""The device memory of a replica of which this process runs every rank: whole tensors are read, written and joined.

The ranks lie along the axis tp, each with parts of the weights; or they are chips that share the batch: then all read
the parameters of the first, which alone updates them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR, Mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.ir.views import with_cut_batch
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.resources import check_node_memory
from sambasim.runtime.transports.communication import mean_of, slices_of
from sambasim.runtime.transports.connect import Allocated, Way, allocate, groups_of
from sambasim.runtime.values.mean import tree_mean
from sambasim.runtime.values.memory import SHARED_KINDS, DeviceMemory, joined, part_of, place_inputs, private_storage


class ReplicaMemory:
    """`program`: as one rank executes it. `memories`: of the ranks, in order."""

    def __init__(self, program: Program, communicator: Communicator) -> None:
        self.chips = program.chips
        self.ranks = program.ranks_of_replica
        self.program = with_cut_batch(program, self.chips)
        self._communicator = communicator
        self._axis = DATA_PARALLEL if self.chips > 1 else TENSOR
        self._members = program.optimizer_states
        self.allocated = allocate(self.program, communicator, Way.IN_PROCESS, range(self.ranks // self.chips))
        first = self.allocated.memories[0]
        if self.chips > 1:
            check_node_memory(communicator, program.device_bytes * (self.chips - 1))
        others = (DeviceMemory(self.program, private_storage(program.device_bytes)) for _ in range(1, self.chips))
        self.memories = [first, *self.allocated.memories[1:], *(memory.with_parameters_of(first) for memory in others)]

    @property
    def updating(self) -> Sequence[DeviceMemory]:
        """Of the ranks that update parameters: all, or the first chip."""
        return self.memories[: self.ranks // self.chips]

    @property
    def lies_along_tp(self) -> bool:
        return self.ranks > self.chips

    @property
    def mesh(self) -> Mesh | None:
        """That of the job, if it has other axes than dp."""
        if not self.lies_along_tp:
            return None
        return mesh_of(self.program.mesh, self._communicator.world_size * self.ranks)

    @property
    def is_sliced(self) -> bool:
        """Whether each process has only its own slices of the optimizer's state."""
        return any(shared.shares_parameters for shared in self.allocated.devices)

    def connect_replicas(self, way: Way, *, keep_states: bool) -> Allocated:
        """Collective. Bring memory to where replicas that sync by `way` need it. The first process of a node writes
        what the node shares. With `keep_states`, optimizer states are moved too; otherwise they are zero."""
        mesh, communicator = self.mesh, self._communicator
        before, count = self.allocated, len(self.allocated.memories)
        ranks = range(communicator.rank * count, (communicator.rank + 1) * count)
        if way is not Way.DEVICE:
            self.allocated = Allocated(before.memories, groups_of(communicator, ranks, mesh))
            return self.allocated
        self.allocated = allocate(self.program, communicator, way, ranks, mesh)
        first, *rest = self.allocated.memories
        others = self.memories[len(before.memories) :]
        self.memories = [first, *rest, *(memory.with_parameters_of(first) for memory in others)]
        for symbol in self.program.symbols.values():
            if symbol.offset is None or symbol.kind is SymbolKind.REDUCE_BUFFER:
                continue
            if symbol.kind is not SymbolKind.OPTIMIZER_STATE or keep_states:
                for rank, memory in enumerate(before.memories):
                    self._write(symbol, rank, memory.tensor(symbol.name))
        communicator.node_barrier()
        return self.allocated

    def place(self, inputs: Mapping[str, Tensor]) -> None:
        """Copy a batch to the ranks."""
        for rank, memory in enumerate(self.memories):
            place_inputs(memory, self._parts(inputs, rank))

    def write(self, name: str, value: Tensor) -> None:
        """Set the whole of the symbol `name` to `value`; the first process of a node writes what it shares."""
        symbol = self.program.symbols[name]
        for rank in range(self.ranks):
            self._write(symbol, rank, part_of(value, symbol.cuts, {self._axis: rank}))

    def read(self, name: str, *, unreduced: bool = False) -> Tensor:
        """A copy of the whole of the symbol `name`. `unreduced`: each chip has its own gradients. Raises OptionError
        for a state of which another node has a part."""
        symbol = self.program.symbols[name]
        if unreduced and self.chips > 1 and symbol.kind is SymbolKind.GRADIENT:
            return mean_of([memory.tensor(name) for memory in self.memories])
        if symbol.cuts:
            return joined([self._read(name, rank) for rank in range(self.ranks)], symbol.cuts[0])
        return self._read(name, 0)

    def joined(
        self, of_ranks: Sequence[dict[str, Tensor]], of_inputs: frozenset[str] = frozenset()
    ) -> dict[str, Tensor]:
        """The outputs of the replica, from those of its ranks. `of_inputs`: the outputs that are gradients of inputs,
        which chips compute of their own means."""
        if self.ranks == 1:
            return of_ranks[0]
        outputs = {}
        for name in of_ranks[0]:
            parts, cuts = [outputs_of_rank[name] for outputs_of_rank in of_ranks], self.program.symbols[name].cuts
            if cuts:
                outputs[name] = joined(parts, cuts[0])
                if name in of_inputs and self.chips > 1:
                    outputs[name] /= self.chips
            else:
                outputs[name] = mean_of(parts) if self.chips > 1 else parts[0]
        return outputs

    def tangents(self, tangent: Tensor | dict[str, Tensor] | None) -> Sequence[Tensor | dict[str, Tensor] | None]:
        """What the backward of each rank starts from. The gradient of a replica is the mean over its chips."""
        if self.chips == 1 or tangent is None:
            return [tangent] * self.ranks
        names = [name for name, symbol in self.program.symbols.items() if symbol.kind is SymbolKind.TANGENT]
        by_name = tangent if isinstance(tangent, dict) else {names[0]: tangent}
        of_ranks = []
        for rank in range(self.ranks):
            parts = self._parts(by_name, rank)
            scaled = {
                name: part * self.chips if self.program.symbols[name].cuts else part for name, part in parts.items()
            }
            of_ranks.append(scaled if isinstance(tangent, dict) else scaled[names[0]])
        return of_ranks

    def reduce_chips(self) -> None:
        """Replace the gradients of the first chip by the means over all."""
        if self.chips > 1:
            for group in self.program.groups:
                gradients = [memory.region(group, "gradient") for memory in self.memories]
                tree_mean(gradients, gradients[0], self.chips)()

    def _parts(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        symbols = self.program.symbols
        return {name: part_of(tensor, symbols[name].cuts, {self._axis: rank}) for name, tensor in tensors.items()}

    def _write(self, symbol: Symbol, rank: int, value: Tensor) -> None:
        memory = self.memories[rank]
        if symbol.kind in SHARED_KINDS and not memory.has_own_parameters:
            return
        if symbol.kind is SymbolKind.OPTIMIZER_STATE and rank >= len(self.allocated.memories):
            return  # this chip updates nothing
        place = memory.tensor(symbol.name)
        if symbol.name in self._members and self.is_sliced:
            group, member, _ = self._members[symbol.name]
            slices = slices_of(self.program, self._communicator.world_size)[group.name]
            start, stop = slices[self._communicator.rank]
            low, high = max(start, member.start) - member.start, min(stop, member.start + member.numel) - member.start
            if low < high:
                place.view(-1)[low:high].copy_(value.flatten()[low:high])
        else:
            place.copy_(value)

    def _read(self, name: str, rank: int) -> Tensor:
        place = self.memories[rank].tensor(name)
        if name not in self._members or not self.is_sliced:
            return place.clone()
        group, member, state = self._members[name]
        if self._communicator.node_count > 1:
            raise OptionError(
                f"{name} is in slices on {self._communicator.node_count} nodes, and cannot be read here",
                remedy="sync through the host where optimizer state is to be saved: leave out --reduce-on-rdu",
            )
        whole = torch.empty_like(place)
        flat = whole.view(-1)
        for replica, (start, stop) in enumerate(slices_of(self.program, self._communicator.world_size)[group.name]):
            low, high = max(start, member.start), min(stop, member.start + member.numel)
            if low < high:
                region = self.allocated.devices[rank].by_rank[replica].region(group, state)
                flat[low - member.start : high - member.start].copy_(region[low:high])
        return whole
