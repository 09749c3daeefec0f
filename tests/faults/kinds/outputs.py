"""Places that cannot be written to: refused before the work that would be lost."""

from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.texts import TRAIN, net

_NET = {"net.py": net("raise RuntimeError('nobody should have come this far')")}
_FILE = {"file": ""}


def _link_to_nowhere(folder: Path) -> None:
    (folder / "away").symlink_to(folder / "nowhere")


OUTPUTS: tuple[Fault, ...] = (
    Fault(
        "the PEF below a file",
        f"{TRAIN} --output-folder net.py",
        2,
        ("the PEF cannot be written to net.py/net/net.pef", "HERE/net.py is not a folder", "--output-folder FOLDER"),
        _NET,
    ),
    Fault(
        "the PEF where a folder is",
        TRAIN,
        2,
        ("the PEF cannot be written to out/net/net.pef", "out/net/net.pef is a folder", "--output-folder FOLDER"),
        {**_NET, "out/net/net.pef/file": ""},
    ),
    Fault(
        "the PEF where nothing can be",
        f"{TRAIN} --output-folder /proc/nets",
        2,
        ("the PEF cannot be written to /proc/nets/net/net.pef", "no file can be made in /proc", "--output-folder"),
        _NET,
    ),
    Fault(
        "the metrics below a file",
        "run --pef net --metrics file/deep/m.jsonl",
        2,
        ("the metrics file cannot be written to file/deep/m.jsonl", "HERE/file is not a folder", "--metrics FILE"),
        _FILE,
        pefs=("net",),
    ),
    Fault(
        "the metrics through a link to nowhere",
        "run --pef net --metrics away/m.jsonl",
        2,
        ("the metrics file cannot be written to away/m.jsonl", "HERE/away is not a folder", "--metrics FILE"),
        pefs=("net",),
        prepare=_link_to_nowhere,
    ),
    Fault(
        "the metrics on a full disk",
        "run --pef net --metrics /dev/full",
        2,
        ("error[machine]: the metrics file /dev/full cannot be written any more: No space left", "free space"),
        pefs=("net",),
    ),
    Fault(
        "the weights under another suffix",
        "run --pef net --save w.pt",
        2,
        ('save = "w.pt" (from --save): must be a .safetensors file', "--save w.safetensors"),
        pefs=("net",),
    ),
    Fault(
        "the logs in a file",
        "run --pef net --log-dir file",
        2,
        ("the logs cannot be written to file", "HERE/file is not a folder", "--log-dir FOLDER"),
        _FILE,
        pefs=("net",),
    ),
)
