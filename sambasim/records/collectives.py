"""The result of `sambasim bench collectives`: one JSON line.

    algorithm bandwidth   bytes of the buffer / time
    bus bandwidth         algorithm bandwidth × 2 (n - 1) / n for n ranks: the least that the slowest link carried
    copy bound            the time that all ranks need to copy (n + 1) / 2 buffers together, at the same time: an
                          all-reduce in memory reads n buffers and writes one; a copy reads and writes equal bytes

Bandwidths are defined as in PERFORMANCE.md of nccl-tests. A time is the median over runs; the time of a run is that of
its slowest rank. Everything is measured.
"""

from typing import Literal

from sambasim.records import Record

DEFINITIONS = (
    "algorithm bandwidth = bytes / time; bus bandwidth = algorithm bandwidth × 2 (n - 1) / n for n ranks (nccl-tests)",
    "copy bound = time to copy (n + 1) / 2 buffers, by all ranks at once: the bytes that an all-reduce in memory moves",
    "time = median over runs; the time of a run is that of its slowest rank",
)


class PathRecord(Record):
    """One path at one size.

    measured_s, least_s: the median over runs, and the fastest run, which is the better estimate on a busy machine
    result: what every rank has afterwards
    checked: how results were compared with the reference: "bits" equal to those of the addition tree, or within the
        "rounding" error of any order of additions
    """

    path: str
    result: Literal["mean", "sum"]
    checked: Literal["bits", "rounding"]
    measured_s: float
    least_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    to_copy_bound: float


class SizeRecord(Record):
    """All paths at one size. All ranks together copied `copy_bytes` in `copy_bound_s`."""

    size_bytes: int
    runs: int
    copy_bytes: int
    copy_bound_s: float
    paths: tuple[PathRecord, ...]


class LeftOutRecord(Record):
    """A size that was not measured, and why."""

    size_bytes: int
    reason: str


class CollectivesRecord(Record):
    """The whole measurement. `node_of` is the node of each rank."""

    kind: Literal["collectives"] = "collectives"
    world_size: int
    node_of: tuple[int, ...]
    threads: int
    torch: str
    mpi: str
    sizes: tuple[SizeRecord, ...]
    left_out: tuple[LeftOutRecord, ...]
