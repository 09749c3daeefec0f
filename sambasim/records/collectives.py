"""What `sambasim bench collectives` found: one JSON line.

    algorithm bandwidth   bytes of the buffer / time
    bus bandwidth         algorithm bandwidth × 2 (n - 1) / n, for n ranks: what the slowest link must have carried
    copy bound            the time in which all ranks, at the same time, copy (n + 1) / 2 buffers in all: an all-reduce
                          in memory reads n buffers and writes one, and a copy reads as many bytes as it writes

Source of the bandwidths: PERFORMANCE.md of nccl-tests. A time is the median over runs, and that of one run is the
longest of any rank. Everything was measured, but for what `PredictionsRecord` holds.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

DEFINITIONS = (
    "algorithm bandwidth = bytes / time; bus bandwidth = algorithm bandwidth × 2 (n - 1) / n for n ranks (nccl-tests)",
    "copy bound = all ranks, at the same time, copy (n + 1) / 2 buffers: the bytes that an all-reduce in memory moves",
    "time = median over runs; of one run, the longest of any rank",
)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PathRecord(_Record):
    """One path at one size.

    `measured_s` is the median over runs, `least_s` the quickest run: on a busy machine, what is left of the truth.
    `result` says what the path leaves on every rank. `checked` says how the first and the last result of each turn were
    compared: with the bits of the tree of additions, or within the rounding error that any order of additions keeps.
    """

    path: str
    result: Literal["mean", "sum"]
    checked: Literal["bits", "rounding"]
    measured_s: float
    least_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    to_copy_bound: float


class SizeRecord(_Record):
    """All paths at one size. `copy_bytes` is what all ranks together copied in `copy_bound_s`."""

    size_bytes: int
    runs: int
    copy_bytes: int
    copy_bound_s: float
    paths: tuple[PathRecord, ...]


class LeftOutRecord(_Record):
    """A size that was not measured, and why."""

    size_bytes: int
    reason: str


class LinkRecord(_Record):
    """A way between two ranks, as it was measured for predictions: latency of a message, seconds for each byte."""

    latency_s: float
    transfer_s_per_byte: float


class ScheduleRecord(_Record):
    """The schedule that is predicted fastest for one size."""

    size_bytes: int
    algorithm: str
    predicted_s: float
    reason: str


class PredictionsRecord(_Record):
    """Predicted from the parameters given here, which were measured: links within a node and between nodes, None where
    the job has no two such ranks, and the time to add one byte."""

    within: LinkRecord | None
    between: LinkRecord | None
    addition_s_per_byte: float
    schedules: tuple[ScheduleRecord, ...]


class CollectivesRecord(_Record):
    """The whole measurement. `node_of` has the node of each rank."""

    kind: Literal["collectives"] = "collectives"
    world_size: int
    node_of: tuple[int, ...]
    threads: int
    torch: str
    mpi: str
    sizes: tuple[SizeRecord, ...]
    left_out: tuple[LeftOutRecord, ...]
    predictions: PredictionsRecord | None = None
