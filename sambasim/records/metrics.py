"""The lines of `sambasim run --metrics`, one JSON record each. Every time is measured, except in a PredictedRecord.
And the line of `sambasim bench collectives`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, with_config

from sambasim.errors import LARGEST_RECORDS_BYTES, ArtifactError, IncompleteError, OptionError, failing_with
from sambasim.files import in_memory, read_text
from sambasim.records import Count, Figure, Loss, Record, RunFacts, parsed


@with_config(extra="forbid")
@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One optimizer step; steps and epochs count from 1. `loss` is the mean over replicas and micro-steps, and so is
    what is `logged` beside it, by the names that the model or the loss gives. Figures are those of rank 0: `step_s` of
    the whole step, reading data included; `sync_s` in REDUCE, GATHER and the exchange of GRADNORM after its backward
    ended, waiting included, and in the passes of ZeRO 2 and 3; `hidden_sync_s` that before its backward ended, both
    without OPT; `waited_s` in communication within a replica, by mesh axis. `loss_scale` is that of the step, in
    float16; `grad_norm` is without it. It is validated when it is read: a step may take less time."""

    kind: Literal["step"] = "step"
    step: Count
    epoch: Count
    loss: Loss
    logged: dict[str, Loss] = field(default_factory=dict)
    lr: Annotated[float, Field(allow_inf_nan=False)]
    step_s: Figure
    sync_s: Figure
    hidden_sync_s: Figure = 0.0
    waited_s: dict[str, Figure] = field(default_factory=dict)
    samples_per_s: Figure
    grad_norm: float | None = None
    loss_scale: float | None = None


class Measured(Record):
    """What an evaluation, or an inference of a PEF with a loss, says of samples."""

    kind: str
    samples: Count
    loss: float | None
    logged: dict[str, Loss] = Field(default_factory=dict)
    accuracy: float | None
    metrics: dict[str, Loss] = Field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        found = {"loss": self.loss, **self.logged, "accuracy": self.accuracy, **self.metrics}
        return {name: number for name, number in found.items() if number is not None}


class EvaluationRecord(Measured):
    """Means over the held-out samples, each counted once; `logged`: of batches, by their samples. `accuracy` is None if
    the loss is not a classification loss; `metrics` are those of `[evaluation]`, by name."""

    kind: Literal["evaluation"] = "evaluation"
    step: Count
    epoch: Count
    evaluation_s: Figure


class CheckpointRecord(Record):
    """A checkpoint that was written after `step`. `checkpoint_s` is how long training stopped for it."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: Count
    epoch: Count
    path: str
    size_bytes: Count
    checkpoint_s: Figure


@with_config(extra="forbid")
@dataclass(slots=True)
class BytesMoved:
    """Bytes that gradient sync moved, on one rank while it counts, then on all together; each transfer is counted once,
    by its receiver. `peer` is between devices of one node; `network` is carried by MPI, within one machine too."""

    device_to_host: Count = 0
    host_to_device: Count = 0
    peer: Count = 0
    network: Count = 0


class PlacementRecord(Record):
    """Placement of the replicas on the simulated cluster: by replica, its node, its RDU in that node, and the first of
    its `tiles` tiles; `tiles` and `first_tile_of` are None for whole RDUs."""

    device: str
    cluster: str
    tiles: Count | None
    node_of: tuple[Count, ...]
    rdu_of: tuple[Count, ...]
    first_tile_of: tuple[Count, ...] | None


class PredictedRecord(Record):
    """One step of this run as `sambasim simulate` predicts it for devices. `predicted_by_kind_s` includes all of REDUCE
    and GATHER; `predicted_step_s` is the sum of host, FWD, BCKWD, GRADNORM, OPT and `predicted_sync_s`, the part of the
    sync that does not overlap."""

    predicted_for: str
    predicted_step_s: Figure
    predicted_samples_per_s: Figure
    predicted_host_s: Figure
    predicted_model_s: Figure
    predicted_update_s: Figure
    predicted_sync_s: Figure
    predicted_hidden_sync_s: Figure
    predicted_waited_s: dict[str, Figure] = Field(default_factory=dict)
    predicted_by_kind_s: dict[str, Figure]
    predicted_sync: Literal["none", "host", "device"]
    predicted_backed_by: str


class SummaryRecord(RunFacts):
    """The whole run. `state_sha256` is over the parameters, the buffers of replica 0 and the optimizer states, in name
    order; it is promised to be equal for equal threads, torch build and engine. `chips` share the batch of a replica.
    `peak_memory_bytes`: of each process, since it began.
    `training_s` is of rank 0; `model_s` is the part in forward and backward, with reading data and the hidden sync,
    without `waited_s`, by mesh axis. After a resume, they count the steps since `resumed_after_step`. `steps` includes
    `skipped_steps`, whose loss or float16 gradients were not finite; `loss_scale` is that of the next step. `best`: by
    `--keep-best`; the weights are those of `weights_of_step`, the last by default; `stopped_early`: why the run ended
    before its last step; `interrupted`: the signal that stopped it, such as "SIGINT". `lines` counts those before it in
    its file."""

    kind: Literal["summary"] = "summary"
    chips: Count = 1
    mesh: dict[str, Count] = Field(default_factory=dict)
    sync: Literal["none", "host", "device", "emulated"]
    host_sync: Literal["mpi", "gloo", "parameter-server"] | None = None
    wire: Literal["bf16"] | None = None
    parameter_servers: Count = 0
    mpi: str
    batch_size: Count
    global_batch_size: Count
    accumulation_steps: Count
    epochs: Count
    steps: Count
    samples: Count
    samples_left_out_each_epoch: Count
    training_s: Figure
    model_s: Figure = 0.0
    samples_per_s: Figure
    sync_share: Figure
    hidden_sync_s: Figure = 0.0
    waited_s: dict[str, Figure] = Field(default_factory=dict)
    loss_first: Loss
    loss_last: Loss
    first_nonfinite_step: Count | None
    skipped_steps: Count = 0
    loss_scale: float | None = None
    interrupted: str | None = None
    evaluation: EvaluationRecord | None
    best: EvaluationRecord | None = None
    weights_of_step: Count | None = None
    stopped_early: str | None = None
    peak_memory_bytes: tuple[Count, ...] = ()
    bytes: BytesMoved
    weights_sha256: str
    state_sha256: str
    resumed_after_step: Count | None = None
    checkpoint: str | None = None
    failed_checkpoints: Count = 0
    notices: list[str] = Field(default_factory=list)
    placement: PlacementRecord | None = None
    predicted: PredictedRecord | None = None
    not_predicted: str | None = None
    lines: Count | None = None

    @property
    def steps_here(self) -> int:
        """The steps that the seconds are of."""
        return self.steps - (self.resumed_after_step or 0)


Line = StepRecord | EvaluationRecord | CheckpointRecord | SummaryRecord


class InferenceRecord(Measured):
    """A pass over a data set with `--inference`; `held_out`: over the held-out samples only. `loss`, `logged`,
    `accuracy` and `metrics` are those of an evaluation, for a PEF with a loss. `weights` is None for those in the PEF.
    """

    kind: Literal["prediction"] = "prediction"
    pef_digest: str
    data: str
    held_out: bool
    weights: str | None
    prediction_s: Figure
    predictions: str | None
    notices: list[str]


_WRITTEN_BY = "a file of sambasim run --metrics FILE"
LINES: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")], config={"defer_build": True})


def json_line(record: Line) -> str:
    return f"{LINES.dump_json(record).decode()}\n"


def columns_of(record: Line, separator: str = ".") -> dict[str, int | float | None]:
    """The figures of a step or an evaluation, by name; those of a table in it by both names."""
    dumped = LINES.dump_python(record, exclude={"kind"})
    figures: dict[str, int | float | None] = {"step": dumped["step"], "epoch": dumped["epoch"]}
    for name, value in dumped.items():
        if isinstance(value, dict):
            figures |= {f"{name}{separator}{inner}": figure for inner, figure in value.items()}
        else:
            figures[name] = value
    return figures


class RunRecords(NamedTuple):
    """Steps and evaluations of a run, in order, no step missing; those of a resumed run may begin later than at step 1.
    A run that failed or is still running has no summary."""

    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    summary: SummaryRecord | None


def read_run(path: Path) -> RunRecords:
    """The records in `path`, without an incomplete last line. Raises OptionError, or ArtifactError with the number of
    the line that is wrong, or does not follow the one before it."""
    if path.suffix == ".csv":
        what = f"{path} is a table for other programs, without what identifies the run"
        raise OptionError(what, remedy="sambasim run --metrics FILE.jsonl writes all records")
    with failing_with(OptionError, f"{path} cannot be read", _WRITTEN_BY), in_memory(path):
        *lines, _ = read_text(path, LARGEST_RECORDS_BYTES).split("\n")
        numbered = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1))
        records = [parsed(line, LINES.validate_json, "--metrics", where) for where, line in numbered]
    if not records:
        remedy = "write one with sambasim run --metrics FILE, or wait for the first step"
        raise ArtifactError(f"{path} has no records", remedy=remedy)
    summary = records[-1] if isinstance(records[-1], SummaryRecord) else None
    _check_order(records, summary, path)
    return RunRecords(
        tuple(record for record in records if isinstance(record, StepRecord)),
        tuple(record for record in records if isinstance(record, EvaluationRecord)),
        summary,
    )


def _check_order(records: Sequence[Line], summary: SummaryRecord | None, path: Path) -> None:
    """Raises IncompleteError unless steps follow one another, each with its evaluation and checkpoint behind it."""
    most = math.inf if summary is None else summary.resumed_after_step or 0  # steps before the first line
    last: int | None = None
    of_step: list[Line] = []
    for number, record in enumerate(records, 1):
        step, is_step = (record.steps if isinstance(record, SummaryRecord) else record.step), record.kind == "step"
        due = min(step, most + is_step) if last is None else last + is_step
        what = f"a line is of step {step}, where one of step {due} is due" if step != due else None
        if of_step and of_step[-1] is summary:
            what = "a line follows the summary"
        elif record in of_step:
            what = "a line is there twice"
        elif record is summary and summary.evaluation not in (None, *of_step):
            what = "the evaluation in the summary is not there"
        elif record is summary and summary.lines not in (None, number - 1):
            what = f"of {summary.lines} lines before the summary, {number - 1} are there"
        if what is not None:
            remedy = "run again, or give the file as sambasim run --metrics wrote it"
            raise IncompleteError(f"{path.name}: {what}", where=f"{path}:{number}", remedy=remedy)
        last, of_step = step, [record] if is_step else [*of_step, record]


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
