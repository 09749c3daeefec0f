"""Files: PEFs and weights that are missing, damaged or of something else; places that cannot be written to."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.faults.fault import Fault
from tests.faults.texts import TRAIN, net
from tests.pef import damage
from tests.support.recordings import a_step, write_recording

_PEF = Path("out", "net", "net.pef")
_WEIGHTS = "run --pef net --weights w.safetensors"


def _on_pef(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / _PEF)


def _version(fields: damage.Fields) -> None:
    fields["version"] = "9.0"
    fields["writer"] = "sambasim 9.1"


def _save(tensors: dict[str, Tensor]) -> Callable[[Path], object]:
    return lambda folder: save_file(tensors, folder / "w.safetensors")


def _recorded(folder: Path) -> None:
    recording = write_recording(folder / "a", {0: [a_step(1)]})
    with (recording / "replica-0.jsonl").open("a", encoding="utf-8") as file:
        file.write("no line of a recording\n")


FILES: tuple[Fault, ...] = (
    Fault(
        "digests with a line that is none",
        "compare a a",
        ("a line is not what sambasim run --record-digests writes", "a/replica-0.jsonl:2", "of this version"),
        prepare=_recorded,
        exit_code=3,
    ),
    Fault(
        "no PEF of that name",
        "run --pef nett",
        (
            "error[option]: there is no PEF 'nett'",
            "searched nett (not there), then out/nett/nett.pef (not there), from HERE",
            "one of those in out: net, pair",
        ),
        pefs=("net", "pair"),
    ),
    Fault(
        "not a zip",
        "run --pef net.pef",
        ("error[pef]: net.pef breaks rule 2", "it begins with b'hell', so it is no PEF", "that sambasim compile wrote"),
        {"net.pef": "hello"},
        exit_code=3,
    ),
    Fault(
        "of a newer version",
        "run --pef net",
        ("it is a PEF of format 9.0, written by sambasim 9.1; sambasim", "reads format", "compile the model again"),
        pefs=("net",),
        prepare=_on_pef(partial(damage.change_fields, change=_version)),
        exit_code=3,
    ),
    Fault(
        "no section of that number",
        "inspect net --section 99",
        ("there is no section 99: the graph training of net has 3 sections", "sambasim inspect out/net/net.pef"),
        pefs=("net",),
    ),
    Fault(
        "weights that are not there",
        _WEIGHTS,
        ("error[weights]: the weights file w.safetensors is not there", "--weights FILE.safetensors, made by --save"),
        pefs=("net",),
        exit_code=3,
    ),
    Fault(
        "weights of another model",
        _WEIGHTS + " --inference --predictions p.safetensors",
        (
            "w.safetensors does not fit the PEF net: missing linear.bias; not in the model head.weight, norm.bias",
            "use the weights of a run of this model",
        ),
        pefs=("net",),
        prepare=_save({"linear.weight": torch.ones(3, 8), "head.weight": torch.ones(2), "norm.bias": torch.ones(3)}),
        exit_code=3,
    ),
    Fault(
        "the PEF below a file",
        f"{TRAIN} --output-folder net.py",
        ("the PEF cannot be written to net.py/net/net.pef", "HERE/net.py is not a folder", "--output-folder FOLDER"),
        {"net.py": net("raise RuntimeError('not called')")},
    ),
    Fault(
        "the metrics on a full disk",
        "run --pef net --metrics /dev/full",
        ("error[machine]: the metrics file /dev/full cannot be written any more: No space left", "free space"),
        pefs=("net",),
    ),
    Fault(
        "the logs in a file",
        "run --pef net --log-dir file",
        ("the logs cannot be written to file", "HERE/file is not a folder", "--log-dir FOLDER"),
        {"file": ""},
        pefs=("net",),
    ),
)
