"""Checkpoints: flags that contradict each other, folders without any, and those that are damaged or of another run."""

import json
from collections.abc import Callable
from pathlib import Path

from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from tests.faults.command import sambasim
from tests.faults.fault import Fault
from tests.runtime.checkpoint import samples

_RUN = "run --pef net --data synthetic --no-evaluate --steps 4"
_SAVED = Path("saved", "step-0000000002")


def _train(folder: Path) -> None:
    """Checkpoints after steps 1 and 2 of a run of the PEF `net`."""
    outcome = sambasim([*_RUN.split()[:-1], "2", "--checkpoint-dir", "saved", "--checkpoint-every", "1"], folder)
    assert outcome.exit_code == 0, outcome.stderr


def _trained(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Those, and the newest of them changed."""

    def prepare(folder: Path) -> None:
        _train(folder)
        change(folder / _SAVED)

    return prepare


def _of_another_pef(fields: samples.Fields) -> None:
    fields["pef"].update(digest="0" * 64, batch_size=99)


def _both_damaged(folder: Path) -> None:
    _train(folder)
    for path in (folder / "saved").glob("step-*"):
        (path / MANIFEST_FILE).write_text(json.dumps({"format": "nothing"}))


CHECKPOINTS: tuple[Fault, ...] = (
    Fault(
        "to resume from nowhere",
        f"{_RUN} --resume auto",
        ("--resume", "needs the folder of the checkpoints", "add --checkpoint-dir DIR"),
        pefs=("net",),
    ),
    Fault(
        "no checkpoint to resume from",
        f"{_RUN} --checkpoint-dir saved --resume",
        ("error[option]: there is no checkpoint in saved", "leave out --resume to start from the beginning"),
        pefs=("net",),
    ),
    Fault(
        "a folder that is no checkpoint",
        f"{_RUN} --resume empty",
        ("error[option]: empty is no checkpoint and holds none", "--resume DIR/step-…"),
        pefs=("net",),
        prepare=lambda folder: (folder / "empty").mkdir(),
    ),
    Fault(
        "a new run among the checkpoints of another",
        f"{_RUN} --checkpoint-dir saved",
        ("error[option]: saved holds checkpoints of an earlier run, the newest step-0000000002", "add --resume"),
        pefs=("net",),
        prepare=_train,
    ),
    Fault(
        "two courses of one run in a folder",
        f"{_RUN} --checkpoint-dir saved --resume saved/step-0000000001",
        ("saved holds 1 later checkpoints than that of step 1", "name another --checkpoint-dir"),
        pefs=("net",),
        prepare=_train,
    ),
    Fault(
        "a bit of a shard",
        f"{_RUN} --checkpoint-dir saved --resume",
        (f"step-0000000002 is damaged: {samples.SHARD}: its content", "--resume auto"),
        pefs=("net",),
        prepare=_trained(samples.flip_a_bit),
        exit_code=3,
    ),
    Fault(
        "a checkpoint that is not there",
        f"{_RUN} --checkpoint-dir saved --resume=elsewhere",
        ("there is no checkpoint elsewhere", "--resume auto", "the newest in saved: --resume saved/step-0000000002"),
        pefs=("net",),
        prepare=_trained(lambda path: None),
    ),
    Fault(
        "nothing that is whole",
        f"{_RUN} --checkpoint-dir saved --resume auto",
        ("error[checkpoint]: all 2 checkpoints in saved are damaged", '"format"', "start from the beginning"),
        pefs=("net",),
        prepare=_both_damaged,
        exit_code=3,
    ),
    Fault(
        "a checkpoint of another PEF",
        f"{_RUN} --checkpoint-dir saved --resume",
        ("error[checkpoint]: the checkpoint is of another PEF than net: its batch size is 99 and not", "run the PEF"),
        pefs=("net",),
        prepare=_trained(lambda path: samples.change_fields(path, _of_another_pef)),
        exit_code=3,
    ),
    Fault(
        "another seed in the midst of an epoch",
        f"{_RUN} --checkpoint-dir saved --resume --seed 9",
        ("within epoch 1, and training.seed = 9 (checkpoint: 0)", "resume with the options"),
        pefs=("net",),
        prepare=_train,
    ),
    Fault(
        "another rate, where exactness is asked for",
        f"{_RUN} --checkpoint-dir saved --resume --exact --lr 0.7",
        ("error[option]: --exact: ", "optimizer.lr = 0.7 (checkpoint: ", "leave out --exact"),
        pefs=("net",),
        prepare=_train,
    ),
)
