"""One JSON line each: a step, an evaluation, and at the end the summary.

Every time here was measured on this machine, but for those of a PredictedRecord, whose names all say so.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepRecord(_Record):
    """One optimizer step; steps and epochs count from 1.

    `loss` is the mean over replicas and micro-steps; `samples_per_s` counts all replicas. `step_s` is the whole step on
    rank 0, data included; `sync_s` the part of it in REDUCE, GATHER and the exchange of GRADNORM after rank 0's own
    backward had ended, waiting for slower replicas included; `hidden_sync_s` the part before that. Neither has OPT.
    """

    kind: Literal["step"] = "step"
    step: int
    epoch: int
    loss: float
    lr: float
    step_s: float
    sync_s: float
    hidden_sync_s: float = 0.0
    samples_per_s: float
    grad_norm: float | None = None


class EvaluationRecord(_Record):
    """Means over the held-out samples, each counted once. `accuracy` is None where the loss is no classification."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    epoch: int
    samples: int
    loss: float | None
    accuracy: float | None
    evaluation_s: float


class CheckpointRecord(_Record):
    """A checkpoint that was written after `step`, in the epoch that counts from 1. `checkpoint_s` is what the run stood
    still for it."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    epoch: int
    path: str
    size_bytes: int
    checkpoint_s: float


class BytesRecord(_Record):
    """Bytes that gradient sync moved on all ranks together, by kind, each counted once, where it arrived.

    `peer`: between devices of one node; `network`: carried by MPI, also between hosts' buffers of one machine.
    """

    device_to_host: int
    host_to_device: int
    peer: int
    network: int


class PlacementRecord(_Record):
    """Where replicas sit on the simulated machine: by replica, the node, the RDU of that node, and the first of its
    `tiles` tiles there; None for whole RDUs."""

    device: str
    cluster: str
    tiles: int | None
    node_of: tuple[int, ...]
    rdu_of: tuple[int, ...]
    first_tile_of: tuple[int, ...] | None


class PredictedRecord(_Record):
    """What one step of this run would take on devices, by the model of `sambasim simulate`; nothing of it is measured.

    `predicted_by_kind_s` is of sections on one device, all micro-steps together, REDUCE and GATHER included, which are
    hidden in part: `predicted_step_s` is host, FWD, BCKWD, GRADNORM, OPT and `predicted_sync_s`, the part of the sync
    that is waited for.
    """

    predicted_for: str
    predicted_step_s: float
    predicted_samples_per_s: float
    predicted_host_s: float
    predicted_model_s: float
    predicted_update_s: float
    predicted_sync_s: float
    predicted_hidden_sync_s: float
    predicted_by_kind_s: dict[str, float]
    predicted_sync: Literal["none", "host", "device"]
    predicted_backed_by: str


class SummaryRecord(_Record):
    """The whole run. Digests are over tensors in name order, little-endian: parameters alone, or with buffers (those of
    replica 0) and the state of the optimizer. Equal digests are promised at equal threads, torch build and engine.

    `world_size` counts replicas. `host_sync` is None unless `sync` is "host". `parameter_servers` are ranks that only
    served, beside the replicas. Of `training_s`, rank 0 spent `model_s` in forward and backward, with the data for them
    and what is hidden of the sync behind them. A run that was resumed says after which step; its seconds are of the
    steps since. `steps` counts `skipped_steps` too, which were not applied because their loss was not finite;
    `state_sha256` does not. `checkpoint` is the last one that was written. `notices` are what the run said of itself
    when it began. `predicted` is None where `not_predicted` says why.
    """

    kind: Literal["summary"] = "summary"
    pef_digest: str
    world_size: int
    emulated: bool
    sync: Literal["none", "host", "device", "emulated"]
    host_sync: Literal["mpi", "gloo", "parameter-server"] | None = None
    parameter_servers: int = 0
    engine: str
    threads: int
    torch: str
    mpi: str
    seed: int
    batch_size: int
    global_batch_size: int
    accumulation_steps: int
    epochs: int
    steps: int
    samples: int
    samples_left_out_each_epoch: int
    training_s: float
    model_s: float = 0.0
    samples_per_s: float
    sync_share: float
    hidden_sync_s: float = 0.0
    loss_first: float
    loss_last: float
    first_nonfinite_step: int | None
    skipped_steps: int = 0
    evaluation: EvaluationRecord | None
    bytes: BytesRecord
    weights_sha256: str
    state_sha256: str
    exempt_from_exactness: list[str]
    resumed_after_step: int | None = None
    checkpoint: str | None = None
    failed_checkpoints: int = 0
    notices: list[str] = []
    placement: PlacementRecord | None = None
    predicted: PredictedRecord | None = None
    not_predicted: str | None = None


Record = StepRecord | EvaluationRecord | CheckpointRecord | SummaryRecord


class PredictionRecord(_Record):
    """A pass over a data set with `--inference`. `loss` and `accuracy` as in an evaluation, for a PEF with a loss.

    `held_out` says that only the held-out samples of `data` were predicted; `weights` is None for those of the PEF.
    """

    kind: Literal["prediction"] = "prediction"
    pef_digest: str
    data: str
    held_out: bool
    weights: str | None
    samples: int
    loss: float | None
    accuracy: float | None
    prediction_s: float
    predictions: str | None
