"""Bad command lines: wrong flags, and files and checkpoints that are missing, damaged or of something else."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.faults.command import sambasim
from tests.faults.fault import TRAIN, Fault, net, table

_WEIGHTS = "run --pef net --weights w.safetensors"


def _save(tensors: dict[str, Tensor]) -> Callable[[Path], object]:
    return lambda folder: save_file(tensors, folder / "w.safetensors")


_SYNTHETIC = "run --pef net --data synthetic --no-evaluate --steps 4"


def _train(folder: Path) -> None:
    """Checkpoints after steps 1 and 2 of a run of the PEF `net`: of the same flag the last one counts."""
    sambasim(f"{_SYNTHETIC} --steps 2 --checkpoint-dir saved --checkpoint-every 1", folder).check()


COMMAND_LINES: tuple[Fault, ...] = (
    *table(f"""
compil
    error[usage] ... No such command 'compil'. Did you mean 'compile'?
run --steps 3
    name one PEF: a path, or a name found as ... try:   sambasim run --help
compile -b four
    '-b' / '--batch-size': 'four' is not a valid integer ... --help
run --pef pair -ws 2
    -ws is for compile ... a run has as many as mpirun starts ... mpirun -np 2 sambasim run
run --pef net --inference --on-nonfinite skip --debug-numerics
    2 options are wrong: ... on_nonfinite (from --on-nonfinite): is for training, and this is inference ...
    leave out --on-nonfinite ... debug_numerics (from --debug-numerics): is for training
run --pef net --record-digests d --trace t.json
    record_digests (from --record-digests): takes most of the time of a step ... leave out --record-digests or
run --pef pair --emulate-replicas 1
    at least 2 replicas (-ws 2), and --emulate-replicas 1 was given ...
    try:   sambasim run --pef pair --emulate-replicas 2
run --pef net --data-parallel
    --data-parallel needs REDUCE and GATHER sections, and the PEF net has none ... compile it with --data-parallel
{_WEIGHTS}
    error[weights]: the weights file w.safetensors is not there ... --weights FILE.safetensors, made by --save
run --pef net --metrics /dev/full
    error[machine]: the metrics file /dev/full cannot be written any more: No space left ... free space
{_SYNTHETIC} --resume auto
    --resume ... needs the folder of the checkpoints ... add --checkpoint-dir DIR
"""),
    *table(
        f"""
{_SYNTHETIC} --checkpoint-dir saved
    error[option]: saved holds checkpoints of an earlier run, the newest step-0000000002 ... add --resume
{_SYNTHETIC} --checkpoint-dir saved --resume saved/step-0000000001
    saved holds 1 later checkpoints than that of step 1 ... name another --checkpoint-dir
{_SYNTHETIC} --checkpoint-dir saved --resume=elsewhere
    there is no checkpoint elsewhere ... --resume auto
{_SYNTHETIC} --checkpoint-dir saved --resume --seed 9
    within epoch 1, and training.seed = 9 (checkpoint: 0) ... resume with the options
""",
        prepare=_train,
    ),
    Fault(
        "run --pef net.pef",
        "error[pef]: net.pef breaks rule 2 ... it begins with b'hell', so it is no PEF ... that sambasim compile wrote",
        prepare=lambda folder: (folder / "net.pef").write_text("hello"),
    ),
    Fault(
        _WEIGHTS + " --inference --predictions p.safetensors",
        "w.safetensors do not fit the PEF net: missing linear.bias; not in the model head.weight, norm.bias ... "
        "use the weights of a run of this model",
        prepare=_save({"linear.weight": torch.ones(3, 8), "head.weight": torch.ones(2), "norm.bias": torch.ones(3)}),
    ),
    Fault(
        f"{TRAIN} --output-folder net.py",
        "the PEF cannot be written to net.py/net/net.pef ... HERE/net.py is not a folder ... --output-folder FOLDER",
        net("raise RuntimeError('not called')"),
    ),
    Fault(
        f"{_SYNTHETIC} --resume empty",
        "error[option]: empty is no checkpoint and holds none ... --resume DIR/step-…",
        prepare=lambda folder: (folder / "empty").mkdir(),
    ),
)
