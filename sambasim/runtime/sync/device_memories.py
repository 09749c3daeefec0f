"""The device memories of a node's replicas, in one window that all of its ranks share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind
from sambasim.runtime.device import SHARED_KINDS, DeviceMemory
from sambasim.runtime.huge_pages import Range
from sambasim.runtime.ranks import Communicator, SharedWindow, Topology
from sambasim.runtime.sync.interface import slices_of
from sambasim.units import KIB

SMALL_BYTES = 64 * KIB
"""Up to so many bytes of gradients, each replica adds up all of them: see `small_device`."""


@dataclass(frozen=True, slots=True)
class Devices:
    """By world rank. `shares_parameters` says that all replicas of the node read those of its first rank."""

    window: SharedWindow
    by_rank: Mapping[int, DeviceMemory]
    shares_parameters: bool = True


def is_small(program: Program, topology: Topology) -> bool:
    """Whether replicas all do everything themselves, on parameters of their own."""
    return topology.node_count == 1 and program.gradient_bytes <= SMALL_BYTES


def allocate_devices(program: Program, communicator: Communicator) -> Devices:
    """Collective. Device memory for every rank of the node.

    Raises MachineError if the node lacks shared memory.
    """
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
    """What this rank's part of the window is used for: of the states its own slices, and parameters only if it is the
    first of its node."""
    elsewhere = () if topology.local_rank == 0 else SHARED_KINDS
    # Of peers that share their memory, no operand arrives.
    nowhere = (SymbolKind.REDUCE_BUFFER,) if topology.node_count == 1 else ()
    touched = [
        (symbol.offset, symbol.offset + symbol.type.size_bytes)
        for symbol in program.symbols.values()
        if symbol.offset is not None and symbol.kind not in (SymbolKind.OPTIMIZER_STATE, *elsewhere, *nowhere)
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
