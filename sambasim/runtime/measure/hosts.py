"""Measure the link between hosts as device sync uses it: latency, bandwidth, and time of the processors. All hosts send
at the same time, each to the next one, in pieces as gradients are sent."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter, process_time

import numpy as np

from sambasim.errors import LaunchError
from sambasim.hardware.spec import ClusterSpec, LinkSpec, load_cluster
from sambasim.ir.pieces import PIECE_BYTES
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.transports.links import Links
from sambasim.units import counted

_PIECES, _SHORT_BYTES = 32, 64
_TURNS, _SHORT_TURNS = 5, 100


def measure_hosts(communicator: Communicator) -> ClusterSpec:
    """Collective, of one rank on each of several hosts: `sn30-8` with one RDU a node, and the link between hosts.
    Raises LaunchError for other ranks, MachineError if hosts cannot connect."""
    rank, hosts = communicator.rank, communicator.world_size
    if not 1 < hosts == communicator.node_count:
        ranks, nodes = counted(hosts, "rank"), counted(communicator.node_count, "host")
        what = f"the link between hosts is measured by one rank on each of several, and this job has {ranks} on {nodes}"
        raise LaunchError(what, remedy="mpirun -hosts a,b -ppn 1 -np 2 sambasim bench sync --hosts hosts.toml")
    to, source, came = (rank + 1) % hosts, (rank - 1) % hosts, list[int]()
    sizes = [PIECE_BYTES] * _PIECES + [_SHORT_BYTES]
    places = {(source, number): np.ones(size, np.uint8) for number, size in enumerate(sizes)}
    links = Links(communicator, sorted({to, source}), places, came.append)
    communicator.at_close(links.close)

    def exchange_s(numbers: Sequence[int]) -> tuple[float, float]:
        """Of the slowest host: the seconds until it has what is sent to it, and those of its processors."""
        expected = len(came) + len(numbers)
        communicator.barrier()
        began_s, busy_s = perf_counter(), process_time()
        for number in numbers:
            links.send(to, number, places[source, number], (0,))  # what it holds does not matter
        links.wait_for(lambda: len(came) >= expected)
        took_s = communicator.all_gather_object((perf_counter() - began_s, process_time() - busy_s))
        return max(of[0] for of in took_s), max(of[1] for of in took_s)

    latency_s = median(exchange_s([_PIECES])[0] for _ in range(_SHORT_TURNS))
    long_s, busy_s = map(median, zip(*(exchange_s(range(_PIECES)) for _ in range(_TURNS)), strict=True))
    size_bytes = _PIECES * PIECE_BYTES
    figures = {
        "bandwidth_bytes_per_s": size_bytes / (long_s - latency_s),
        "latency_s": latency_s,
        "processor_s_per_byte": busy_s / size_bytes,
    }
    what = f"measured between {counted(hosts, 'host')}, by sambasim bench sync"
    link = LinkSpec(name="measured", sources=dict.fromkeys(figures, what), **figures)
    base, own = load_cluster("sn30-8"), {"rdus_per_node": 1, "network_link": link, "network_links_per_node": 1}
    return base.model_copy(update={"name": "hosts", **own, "sources": {**base.sources, **dict.fromkeys(own, what)}})
