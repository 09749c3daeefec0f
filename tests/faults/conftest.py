"""Sound PEFs, compiled once, for the rows that need one."""

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tests.faults.command import sambasim
from tests.faults.parallelism import DEEP
from tests.faults.texts import TRAIN, net

_NET = "sambasim_file_net"
"""What the module of a net.py is called, unless that of another folder is loaded already."""

_FLAGS = {"net": "", "pair": "--data-parallel -ws 2", "guess": "--inference"}
_ON_CHIPS = "--tensor-parallel weight --n-chips 2"
_DEEP_FLAGS = {
    "cut": _ON_CHIPS,
    "stages": "--pipeline-stages 2 --micro-batches 2",
    "slices": "--data-parallel -ws 2 --zero 3",
    "guesses": f"--inference {_ON_CHIPS}",
}
"""The PEFs of a deeper model, all but one for several ranks."""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The bytes of PEFs by name: trained alone; data parallel, -ws 2; for inference; and those of `_DEEP_FLAGS`."""
    folder = tmp_path_factory.mktemp("compiled")
    for file, text, pefs in (("sound.py", net(), _FLAGS), ("deep.py", DEEP, _DEEP_FLAGS)):
        (folder / file).write_text(text)
        for name, flags in pefs.items():
            command = f"{TRAIN.replace('net.py', file)} --pef-name {name} {flags}"
            outcome = sambasim(shlex.split(command), folder)
            assert outcome.exit_code == 0, outcome.stderr
    return {name: (folder / "out" / name / f"{name}.pef").read_bytes() for name in (*_FLAGS, *_DEEP_FLAGS)}


@pytest.fixture
def folder(tmp_path: Path, compiled: Mapping[str, bytes]) -> Path:
    (tmp_path / "net.py").write_text(net())
    for name, data in compiled.items():
        path = tmp_path / "out" / name / f"{name}.pef"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def _nets_of_their_own() -> Iterator[None]:
    """Every net.py here is loaded under a name that depends on its folder, and none stays for the tests of others.

    Tracers keep modules by name for the life of the process, so a name must not be used for two files.
    """
    taken = ModuleType(_NET)
    taken.__file__ = "elsewhere/net.py"
    kept = sys.modules.get(_NET)
    sys.modules[_NET] = taken
    yield
    for name in [name for name in sys.modules if name.startswith(_NET)]:
        del sys.modules[name]
    if kept is not None:
        sys.modules[_NET] = kept
