"""Digests of runs that never ran, written as a run writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sambasim.records.digests import RUN_FILE, RecordedRun, StepDigests, ValueDigest, replica_file

VALUES = (
    ValueDigest("input", "x", 0, None, "00" * 8, 3.0),
    ValueDigest("value", "net__relu", 0, 0, "01" * 8, 2.0),
    ValueDigest("loss", "net__loss", 0, 1, "02" * 8, 1.5),
    ValueDigest("gradient", "net__w__grad", 0, 2, "03" * 8, 0.25),
    ValueDigest("parameter", "net__w", None, None, "04" * 8, 5.0),
)


def a_run(**changed: object) -> RecordedRun:
    sections = ["0 FWD net__a", "1 FWD net__b", "2 BCKWD net__c"]
    facts: dict[str, object] = {
        "by": "sambasim 0", "pef": "net", "pef_digest": "f" * 64, "threads": 1, "engine": "plain", "torch": "2.13.0",
        "cpu": "x86_64 AVX2", "exempt_from_exactness": (), "world_size": 2, "emulated": False, "sync": "host",
        "ranks": 1,
        "seed": 0, "options": {"optimizer.lr": 0.1, "training.seed": 0}, "steps": 40, "first_step": 1, "last_step": 1,
        "sections": sections, "sees": "values that leave their section",
    }  # fmt: skip
    return RecordedRun.model_validate({**facts, **changed})


def a_step(
    number: int,
    *,
    loss: float | None = 0.5,
    changed: Mapping[str, ValueDigest | None] | None = None,
    more: Sequence[ValueDigest] = (),
    begins: bool = False,
) -> StepDigests:
    """A step in which VALUES were seen; `changed` says by name what was seen instead, None for nothing."""
    seen = ((changed or {}).get(value.name, value) for value in VALUES)
    values = (*(value for value in seen if value is not None), *more)
    return StepDigests(step=number, begins=begins, loss=loss, values=values)


def write_recording(
    folder: Path, replicas: Mapping[int, Sequence[StepDigests]], run: RecordedRun | None = None
) -> Path:
    """`folder`, with a file of each replica that begins with an empty initial state, unless one is given. `run` is to
    have recorded these steps at least."""
    folder.mkdir(parents=True)
    run = run or a_run()
    last_step = max((step.step for steps in replicas.values() for step in steps), default=1)
    facts = {"ranks": max(replicas) + 1, "last_step": max(run.last_step, last_step)}
    (folder / RUN_FILE).write_text(run.model_copy(update=facts).model_dump_json(), encoding="utf-8")
    for replica, steps in replicas.items():
        begins = [StepDigests(step=step.step - 1, begins=True, values=()) for step in steps[:1] if not step.begins]
        text = "".join(step.model_dump_json() + "\n" for step in (*begins, *steps))
        (folder / replica_file(replica)).write_text(text, encoding="utf-8")
    return folder
