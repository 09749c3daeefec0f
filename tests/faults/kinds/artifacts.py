"""What sambasim wrote itself: PEFs and weights that are missing, damaged, or of something else."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.faults.fault import Fault
from tests.pef import damage
from tests.support.recordings import a_step, write_recording

_PEF = Path("out", "net", "net.pef")
_WEIGHTS = "run --pef net --weights w.safetensors"


def _on_pef(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / _PEF)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _version(fields: damage.Fields) -> None:
    fields["version"] = "9.0"
    fields["writer"] = "sambasim 9.1"


def _lose_a_symbol(fields: damage.Fields) -> None:
    fields["program"]["symbols"].popitem()


def _save(tensors: dict[str, Tensor]) -> Callable[[Path], object]:
    return lambda folder: save_file(tensors, folder / "w.safetensors")


def _recorded(folder: Path) -> None:
    recording = write_recording(folder / "a", {0: [a_step(1)]})
    with (recording / "replica-0.jsonl").open("a", encoding="utf-8") as file:
        file.write("no line of a recording\n")


ARTIFACTS: tuple[Fault, ...] = (
    Fault(
        "digests with a line that is none",
        "compare a a",
        3,
        ("a line is not what sambasim run --record-digests writes", "a/replica-0.jsonl:2", "of this version"),
        prepare=_recorded,
    ),
    Fault(
        "no PEF of that name",
        "run --pef nett",
        2,
        (
            "error[option]: there is no PEF 'nett'",
            "looked for nett (not there), then out/nett/nett.pef (not there), from HERE",
            "one of those in out: net, pair",
        ),
        pefs=("net", "pair"),
    ),
    Fault("a folder", "verify out", 2, ("there is no PEF 'out'", "looked for out (a folder)", "net"), pefs=("net",)),
    Fault(
        "not a zip",
        "run --pef net.pef",
        3,
        ("error[pef]: net.pef breaks rule 2", "it begins with b'hell', so it is no PEF", "that sambasim compile wrote"),
        {"net.pef": "hello"},
    ),
    Fault("empty", "run --pef net.pef", 3, ("breaks rule 2", "it is empty, so it is no PEF"), {"net.pef": ""}),
    Fault(
        "truncated",
        "run --pef net",
        3,
        ("it was cut short", "where: the file, out/net/net.pef", "copy it again, or compile the model again"),
        pefs=("net",),
        prepare=_on_pef(_truncate),
    ),
    Fault(
        "JSON edited, and zipped again",
        "run --pef net",
        2,
        ("this account did not compile net.pef", "where: out/net/net.pef", "add --trust"),
        pefs=("net",),
        prepare=_on_pef(partial(damage.change_manifest, change=lambda text: text.replace(b'"seed":0', b'"seed":7', 1))),
    ),
    Fault(
        "a program that contradicts itself",
        "run --pef net",
        3,
        (
            "error[pef]: net.pef breaks rule 10 of the PEF format (program)",
            "where: pef.json, out/net/net.pef",
            "compile the model again",
        ),
        pefs=("net",),
        prepare=_on_pef(partial(damage.change_fields, change=_lose_a_symbol)),
    ),
    Fault(
        "of a newer version",
        "run --pef net",
        3,
        ("it is a PEF of format 9.0, written by sambasim 9.1; sambasim", "reads format", "compile the model again"),
        pefs=("net",),
        prepare=_on_pef(partial(damage.change_fields, change=_version)),
    ),
    Fault(
        "no section of that number",
        "inspect net --section 99",
        2,
        ("there is no section 99: the graph training of net has 3 sections", "sambasim inspect out/net/net.pef"),
        pefs=("net",),
    ),
    Fault(
        "weights that are not there",
        _WEIGHTS,
        3,
        ("error[weights]: the weights file w.safetensors is not there", "--weights FILE.safetensors, made by --save"),
        pefs=("net",),
    ),
    Fault(
        "weights of another format",
        "run --pef net --weights w.pt",
        2,
        ('weights = "w.pt" (from --weights): must be a .safetensors file', "--weights w.safetensors"),
        {"w.pt": "hello"},
        pefs=("net",),
    ),
    Fault(
        "weights of another model",
        _WEIGHTS + " --inference --predictions p.safetensors",
        3,
        (
            "w.safetensors does not fit the PEF net: missing linear.bias; not in the model head.weight, norm.bias",
            "use the weights of a run of this model",
        ),
        pefs=("net",),
        prepare=_save({"linear.weight": torch.ones(3, 8), "head.weight": torch.ones(2), "norm.bias": torch.ones(3)}),
    ),
)
