"""How many intra-op threads a rank uses. Threads are numerics: matrix products differ in bits between counts."""

import os
from collections.abc import Mapping, Sequence

from sambasim.runtime.ranks import Communicator


def cores_of_this_process() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def default_threads(communicator: Communicator, replicas_here: int, environ: Mapping[str, str] = os.environ) -> int:
    """Collective. What OMP_NUM_THREADS says, or a node's cores divided by its replicas, at least 1; of all ranks the
    least, so that all have the same.

    `replicas_here` is how many replicas this process plays: more than one only in an emulation, which takes the count
    that as many ranks would get.
    """
    chosen = environ.get("OMP_NUM_THREADS", "")
    own = int(chosen) if chosen.isdecimal() and int(chosen) > 0 else None
    node = communicator.topology.node_index
    everybody = communicator.all_gather_object((node, cores_of_this_process(), own))
    nodes = sorted({index for index, _, _ in everybody})
    shares = [_share([cores for index, cores, _ in everybody if index == n], replicas_here) for n in nodes]
    # One count for the whole job: ranks that differ in it would differ in their bits.
    return min(own for _, _, own in everybody if own) if any(own for _, _, own in everybody) else min(shares)


def _share(cores_of_ranks: Sequence[frozenset[int]], replicas_here: int) -> int:
    """The cores of one node's ranks together, for each replica on it."""
    cores: frozenset[int] = frozenset().union(*cores_of_ranks)
    return max(1, len(cores) // (len(cores_of_ranks) * replicas_here))
