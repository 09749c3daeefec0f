"""The summary of a run that never ran."""

from sambasim.records.metrics import BytesMoved, EvaluationRecord, SummaryRecord


def summary(
    sync: str, *, weights: str = "a" * 64, accuracy: float | None = 0.98, state: str = "b" * 64
) -> SummaryRecord:
    evaluation = EvaluationRecord(step=2, epoch=1, samples=360, loss=0.1, accuracy=accuracy, evaluation_s=0.1)
    fields: dict[str, object] = {
        **dict.fromkeys(("world_size", "threads", "batch_size", "epochs", "steps", "samples"), 2),
        **dict.fromkeys(("seed", "global_batch_size", "accumulation_steps", "samples_left_out_each_epoch"), 1),
        **dict.fromkeys(("training_s", "samples_per_s", "sync_share", "loss_first", "loss_last"), 0.5),
        **dict.fromkeys(("pef_digest", "torch", "mpi"), "x"),
        **{"first_nonfinite_step": None, "emulated": False, "engine": "plain", "exempt_from_exactness": []},
        "bytes": BytesMoved(device_to_host=0, host_to_device=0, peer=2048, network=0),
    }
    of_run = {"sync": sync, "evaluation": evaluation, "weights_sha256": weights, "state_sha256": state}
    return SummaryRecord.model_validate(fields | of_run)
