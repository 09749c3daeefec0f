"""How many intra-op threads a rank uses. Threads are numerics: matrix products differ in bits between counts."""

import os
from collections.abc import Mapping

from sambasim.runtime.ranks import Communicator


def cores_of_this_process() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def default_threads(communicator: Communicator, replicas_here: int, environ: Mapping[str, str] = os.environ) -> int:
    """Collective. What OMP_NUM_THREADS says, or the node's cores divided by its replicas, at least 1.

    `replicas_here` is how many replicas this process plays: more than one only in an emulation, which takes the count
    that as many ranks would get.
    """
    chosen = environ.get("OMP_NUM_THREADS", "")
    own = int(chosen) if chosen.isdecimal() and int(chosen) > 0 else None
    topology = communicator.topology
    everybody = communicator.all_gather_object((topology.node_index, cores_of_this_process(), own))
    cores = frozenset().union(*(cores for node, cores, _ in everybody if node == topology.node_index))
    return own or max(1, len(cores) // (topology.local_size * replicas_here))
