"""One kind of bad input, the small sound model that is changed for it, and the check of what is reported."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TypeAlias

from tests.faults.command import sambasim
from tests.support.mpi import SAMBASIM, Result, run_mpi

Compiled: TypeAlias = Callable[[str], bytes]
"""A sound PEF by its name in conftest.py."""

MAX_LINES = 8
_JARGON = ("Traceback", "dynamo", "Dynamo", "FakeTensor", "fake tensor", "graph break", "aot_", "GuardOn", "proxy")


_IMPORTS = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset


"""

SAMPLES = "return TensorDataset(torch.randn(16, 8), torch.arange(16) % 3)"
"""What the function `samples` of `net` does: 16 samples of 8 numbers, each with a class from 0 to 2."""

COMPILE = "compile net.py:Net --set data.source=net.py:samples --set optimizer.name=sgd -b 4"
NAMED_LOSS = "--set loss.name=cross_entropy"
TRAIN = f"{COMPILE} {NAMED_LOSS}"
"""The command line with which `net()`, unchanged, becomes a PEF."""


def net(
    forward: str = "return self.linear(x)",
    *,
    init: str = "self.linear = nn.Linear(8, 3)",
    parameters: str = "x",
    samples: str = SAMPLES,
    before: str = "",
) -> str:
    """The text of net.py: `samples`, and the class `Net`; `forward` takes `parameters`.

    `before` stands between the imports and the rest.
    """
    return (
        f"{_IMPORTS}{before}"
        f"def samples():\n{indent(samples, ' ' * 4)}\n\n\n"
        f"class Net(nn.Module):\n"
        "    def __init__(self):\n"
        f"        super().__init__()\n{indent(init, ' ' * 8)}\n\n"
        f"    def forward(self{', ' + parameters if parameters else ''}):\n{indent(forward, ' ' * 8)}\n"
    )


ASSERTING = net(
    "h = torch.relu(self.middle(torch.relu(self.first(x))))\nassert h.abs().max() < 500, 'too large'\n"
    "if h.mean() > 1:\n    raise ValueError('large in the mean')\nreturn self.last(h)",
    init="self.first = nn.Linear(8, 16)\nself.middle = nn.Linear(16, 16)\nself.last = nn.Linear(16, 3)",
)
"""Its values are asserted, and one is checked in a branch that raises."""


def dataset(getitem: str, length: int = 16) -> str:
    """The text of net.py whose data are `length` samples, of which `getitem` reads sample `i`."""
    before = (
        f"class Samples(Dataset):\n    def __len__(self):\n        return {length}\n\n"
        f"    def __getitem__(self, i):\n{indent(getitem, ' ' * 8)}\n\n\n"
    )
    return net(samples="return Samples()", before=before)


@dataclass(frozen=True, slots=True)
class Fault:
    """A command line, typed in a folder that holds net.py with the text `net`, and the PEF that the command names.

    The message must contain what stands between the dots of `says`, in this order; HERE stands for the folder's path.
    Only files of `may_leave` may be left, and must not look complete. With `ranks`, so many processes under mpirun run
    the command, and report one error.
    """

    command: str
    says: str
    net: str | None = None
    prepare: Callable[[Path], object] | None = None
    may_leave: tuple[str, ...] = ()
    ranks: int = 0

    def check(self, folder: Path, compiled: Compiled) -> None:
        """Run the command in `folder`."""
        if self.net is not None:
            (folder / "net.py").write_text(self.net)
        if named := re.search(r"--pef (\w+)(?= |$)", self.command):
            put(folder, compiled, named[1])
        if self.prepare:
            self.prepare(folder)
        before = contents(folder)
        if self.ranks:
            words, still = shlex.split(self.command), {"PYTHONDONTWRITEBYTECODE": "1"}
            outcome = run_mpi(self.ranks, [*SAMBASIM, *words], cwd=folder, env=still, timeout=120)
        else:
            outcome = sambasim(self.command, folder)
        check_message(outcome, self.says.replace("HERE", str(folder)))
        check_left(folder, before, self.may_leave)


def table(
    text: str, net: str | None = None, prepare: Callable[[Path], object] | None = None, ranks: int = 0
) -> Iterator[Fault]:
    """The faults of a text: a command on each line, and below it, further in, what is said of it."""
    for command, said in re.findall(r"^(\S.*)\n((?: .*\n)+)", text, re.MULTILINE):
        yield Fault(command, " ".join(said.split("\n    ")).strip(), net, prepare, ranks=ranks)


def put(folder: Path, compiled: Compiled, *names: str) -> None:
    """Writes these PEFs where a command that is typed in `folder` finds them by name."""
    for name in names:
        path = folder / "out" / name / f"{name}.pef"
        path.parent.mkdir(parents=True)
        path.write_bytes(compiled(name))


def check_message(outcome: Result, says: str) -> str:
    """There is one short error message, which says that, and no traceback, and its exit code. Returns it."""
    before, mark, rest = outcome.stderr.partition("error[")
    assert mark, f"no error was reported: {outcome.stderr!r}"
    assert all(line.endswith("…") for line in before.splitlines()), f"output before the error: {before!r}"
    message, everything = mark + rest, outcome.stdout + outcome.stderr
    assert_contains(message, says)
    assert outcome.returncode == (3 if message.startswith(("error[pef]", "error[weights]")) else 2), message
    assert everything.count("error[") == 1, everything
    assert len(message.splitlines()) <= MAX_LINES, message
    jargon = [word for word in _JARGON if word in everything]
    assert not jargon, f"{jargon} in {everything}"
    return message


def assert_contains(message: str, says: str) -> None:
    position = 0
    for fragment in says.split(" ... "):
        found = message.find(fragment, position)
        assert found >= 0, f"{fragment!r} is not there, or not in this place:\n{message}"
        position = found + len(fragment)


def contents(folder: Path) -> Mapping[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check_left(folder: Path, before: Mapping[str, bytes | None], may_leave: tuple[str, ...] = ()) -> None:
    """The folder is as before, but for files of `may_leave`, in which no summary says that a run was completed."""
    after = contents(folder)
    changed = {name for name in {*before, *after} if before.get(name, "none") != after.get(name, "none")}
    assert changed <= set(may_leave), f"left behind or changed: {sorted(changed)}"
    for name in changed:
        assert b'"summary"' not in (after[name] or b""), f"{name} looks complete"
