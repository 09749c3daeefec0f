"""Device sync, `--reduce-on-rdu`: the replicas of a node read each other's device memory.

Device memory is a shared memory window, so gradients are read without staging copies or host buffers. Parameters exist
once per node. Between nodes, slices are sent by MPI: see `network`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind
from sambasim.records.trace import Track
from sambasim.runtime.device import SHARED_KINDS, DeviceMemory
from sambasim.runtime.observer import StepObserver, span
from sambasim.runtime.ranks import Communicator, Range, SharedWindow, Topology
from sambasim.runtime.transports.base import Communication, EndOfStep, Fusion, Shared, Transport, slices_of
from sambasim.runtime.transports.flags import Counter, NodeFlags
from sambasim.runtime.transports.messages import collect, gather_losses
from sambasim.runtime.transports.network import Network
from sambasim.runtime.transports.values import MessageLine
from sambasim.runtime.transports.window_reduce import WindowReduce
from sambasim.units import KIB

SMALL_BYTES = 64 * KIB
"""Up to this many bytes of gradients, every replica reduces all of them: see `small_window`."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The device memories of a node's replicas, by world rank. With `shares_parameters`, all replicas of the node use
    the parameters of its first rank."""

    window: SharedWindow
    by_rank: Mapping[int, DeviceMemory]
    shares_parameters: bool = True


def is_small(program: Program, topology: Topology) -> bool:
    """Whether every replica reduces and updates everything itself (`small_window`)."""
    return topology.node_count == 1 and program.gradient_bytes <= SMALL_BYTES


def allocate_devices(program: Program, communicator: Communicator) -> Devices:
    """Collective. Device memory for every rank of the node. Raises MachineError if the node lacks shared memory."""
    topology = communicator.topology
    small = is_small(program, topology)
    window = communicator.allocate_shared(program.device_bytes, None if small else _touched(program, topology))
    storages = {
        rank: window.local if rank == topology.rank else window.of(index)
        for index, rank in enumerate(topology.local_ranks)
    }
    shared = None if small else storages[topology.local_ranks[0]]
    memories = {rank: DeviceMemory(program, storage, shared) for rank, storage in storages.items()}
    return Devices(window, memories, shares_parameters=not small)


def _touched(program: Program, topology: Topology) -> Sequence[Range]:
    """The byte ranges of this rank's part that are used: optimizer states of its own slices only, and parameters only
    on the node's first rank."""
    elsewhere = () if topology.local_rank == 0 else SHARED_KINDS
    # On one node no operands are received.
    unused = (SymbolKind.REDUCE_BUFFER,) if topology.node_count == 1 else ()
    touched = [
        (symbol.offset, symbol.offset + symbol.type.size_bytes)
        for symbol in program.symbols.values()
        if symbol.offset is not None and symbol.kind not in (SymbolKind.OPTIMIZER_STATE, *elsewhere, *unused)
    ]
    slices = slices_of(program, topology.world_size)
    for group in program.groups:
        size = DTYPE_BYTES[group.dtype]
        start, stop = slices[group.name][topology.rank]
        touched += [
            (group.regions[state] + start * size, group.regions[state] + stop * size)
            for state in program.optimizers[group.optimizer].states
        ]
    return touched


@final
class Window(Transport):
    """The owner of a slice reads it from the device memory of the other ranks of the node."""

    def __init__(self, program: Program, devices: Devices, communicator: Communicator) -> None:
        topology = communicator.topology
        line = MessageLine(communicator, range(topology.world_size))
        super().__init__(program, devices.by_rank[topology.rank], line, topology.world_size, topology.rank)
        self.communicator = communicator
        self.rank = topology.rank
        self.by_rank = devices.by_rank
        self.slices = slices_of(program, topology.world_size)
        self.flags = NodeFlags(communicator, self)
        self.network = Network(self)
        self.pass_length = (len(pass_and_update(program.training)[0]) if program.training else 0) + 1
        self.steps = 0

    @property
    def title(self) -> str:
        return "device (peers' device memory)"

    def owned(self, group: ParameterGroup) -> Slice:
        return self.slices[group.name][self.rank]

    def fusions(self) -> Sequence[Fusion]:
        groups = self.program.groups
        return [
            Fusion(
                ("comm.reduce_scatter", "opt", "comm.all_gather"),
                lambda optimizers: WindowReduce(self, groups, optimizers),
            )
        ]

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> WindowReduce:
        return WindowReduce(self, groups, None)

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication:
        return _Spread(self)

    def end_step(self) -> EndOfStep:
        return _Meeting(self)

    def progress(self, count: int) -> int:
        """The counter of a rank that has run `count` sections of this step's last pass."""
        return self.steps * self.pass_length + count

    def wait_for_passes(self) -> None:
        """Wait until all ranks of the node have ended their pass, so that none reads parameters."""
        self.flags.wait(Counter.PROGRESS, self.progress(self.pass_length))

    def spread(self) -> None:
        """Collective. Send updated slices from their owners to all other nodes."""
        if self.network.sources:
            self.wait_for_passes()
            self.network.exchange("parameter")

    def meet(self) -> None:
        """Collective over the node. Wait until all of its ranks have ended this step."""
        self.steps += 1
        self.flags.meet(Counter.UPDATED, self.steps)

    def means(self, group: ParameterGroup) -> Iterator[tuple[int, Tensor]]:
        """After a step without an optimizer, the parts of the mean of `group`, each with the index of its first
        element."""
        for owner, (start, stop) in enumerate(self.slices[group.name]):
            yield start, self.by_rank[self.network.holder(owner)].region(group, "gradient")[start:stop]

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        readable = {rank: memory.region(group, state) for rank, memory in self.by_rank.items()}
        return collect(self.communicator, readable, self.slices[group.name], member)


@final
class _Spread(Communication):
    """GATHER: nothing moves on one node, because its ranks share the parameters."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def begin(self, *operands: object) -> None:
        """Nothing: the exchange must wait until all ranks of the node have ended their pass."""

    def finish(self) -> object:
        self._window.spread()
        return None


@final
class _Meeting(EndOfStep):
    """The end of a step: waits until all ranks have updated their slices, and exchanges losses and requests."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self.replica = window.replica

    @property
    def observer(self) -> StepObserver | None:
        return self._window.observer

    def begin(self, *operands: object) -> None:
        window = self._window
        window.steps += 1
        if not window.network.sources:
            (loss,), request = window.offered
            window.flags.put(window.steps % 2, loss, request)  # a reader may be one step behind
        window.flags.publish(Counter.UPDATED, window.steps)

    @span(Track.COLLECTIVES, "GATHER")
    def finish(self) -> Shared:
        window = self._window
        if window.network.sources:
            shared = gather_losses(window.communicator, *window.offered, range(window.replicas))
            window.flags.wait(Counter.UPDATED, window.steps)  # returns at once: all ranks have been in the exchange
            return shared
        window.flags.wait(Counter.UPDATED, window.steps)
        return Shared(*window.flags.numbers(window.steps % 2))
