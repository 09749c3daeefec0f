"""Whether what is measured fits into the memory of its machines, asked before any of it is taken.

Counted are buffers as large as what is reduced: everything else (blocks of operands, rounds through the host, code)
stays as small as it is for the smallest size.
"""

from collections.abc import Collection

from sambasim.runtime import capacity
from sambasim.runtime.measure.paths import (
    DevicePath,
    HostGlooPath,
    HostMpiPath,
    HostServerPath,
    MpiInPlacePath,
    MpiPath,
)
from sambasim.runtime.ranks import Communicator

_OF_MPI = frozenset({MpiPath.name, MpiInPlacePath.name})
_THROUGH_HOST = frozenset({HostMpiPath.name, HostGlooPath.name, HostServerPath.name})


def needed_bytes(size_bytes: int, paths: Collection[str], rank: int, node_count: int) -> int:
    """Bytes of memory that `rank` takes to measure `paths` at one size, an estimate."""
    buffers = 2  # operand and result: those of the copy bound, of MPI and of gloo
    if DevicePath.name in paths:
        buffers += 1 if node_count == 1 else 2  # gradients in the window; what arrives from other nodes
    if not _THROUGH_HOST.isdisjoint(paths):
        buffers += 1  # gradients in private device memory
    if HostGlooPath.name in paths:
        buffers += 1  # the same on the host
    if HostServerPath.name in paths and rank == 0:
        buffers += 1  # what it serves
    if not _OF_MPI.isdisjoint(paths):
        buffers += 1  # MPI's own, in which it receives what it adds
    return buffers * size_bytes


def check_host_memory(communicator: Communicator, size_bytes: int, paths: Collection[str]) -> None:
    """Collective. Raises MachineError, the same on every rank, if a node lacks the memory to measure this size."""
    topology = communicator.topology
    needed = needed_bytes(size_bytes, paths, topology.rank, topology.node_count)
    capacity.check_node_memory(
        communicator,
        needed,
        what="the memory for the buffers of this node's ranks",
        remedy="measure smaller sizes (--min-bytes, --max-bytes) or fewer --paths, or start fewer ranks",
    )
