"""The result of `sambasim bench collectives`: one JSON line. DEFINITIONS says how its numbers are defined."""

from typing import Literal

from sambasim.records import Record

DEFINITIONS = (
    "algorithm bandwidth = bytes / time; bus bandwidth = algorithm bandwidth × 2 (n - 1) / n for n ranks (nccl-tests)",
    "copy bound = time to copy (n + 1) / 2 buffers, by all ranks at once: the bytes that an all-reduce in memory moves",
    "time = median over runs; the time of a run is that of its slowest rank",
)


class PathRecord(Record):
    """One path at one size. `least_s`: the fastest run; `result`: what every rank has afterwards; `checked`: against
    the reference, with "bits" equal to those of the addition tree, or within the "rounding" error of any order."""

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
