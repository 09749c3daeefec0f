"""Sound PEFs, compiled once, for the rows that need one."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.faults.command import sambasim
from tests.faults.fault import ASSERTING, TRAIN, Compiled, net, put
from tests.faults.parallelism import DEEP

_NET = "sambasim_file_net"
"""What the module of a net.py is called, unless that of another folder is loaded already."""

_FLAGS = {"net": "", "pair": "--data-parallel -ws 2", "guess": "--inference"}
_ON_CHIPS = "--tensor-parallel weight --n-chips 2"
_IN_STAGES = "--pipeline-stages 2 --micro-batches 2"
_DEEP_FLAGS = {
    "cut": _ON_CHIPS,
    "stages": _IN_STAGES,
    "slices": "--data-parallel -ws 2 --zero 3",
    "shared": "--data-parallel --tensor-parallel batch --n-chips 2",
    "guesses": f"--inference {_ON_CHIPS}",
}
"""The PEFs of a deeper model, all but one for several ranks."""
_ASSERTING_FLAGS = {"asserting": "--data-parallel", "asserting_cut": _ON_CHIPS, "asserting_stages": _IN_STAGES}
_FILES = {"sound.py": (net(), _FLAGS), "deep.py": (DEEP, _DEEP_FLAGS), "asserting.py": (ASSERTING, _ASSERTING_FLAGS)}
"""By file of models: its text, and the flags of each PEF of it."""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The bytes of a PEF, which is compiled when it is first asked for: by the account of the session, also within a
    test that has another."""
    folder, account = tmp_path_factory.mktemp("compiled"), os.environ["XDG_STATE_HOME"]
    for file, (text, _) in _FILES.items():
        (folder / file).write_text(text)

    def pef(name: str) -> bytes:
        path = folder / "out" / name / f"{name}.pef"
        if not path.exists():
            file, flags = next((file, flags[name]) for file, (_, flags) in _FILES.items() if name in flags)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_STATE_HOME", account)
                sambasim(f"{TRAIN.replace('net.py', file)} --pef-name {name} {flags}", folder).check()
        return path.read_bytes()

    return pef


@pytest.fixture
def folder(tmp_path: Path, compiled: Compiled) -> Path:
    """A net.py, and its PEFs."""
    (tmp_path / "net.py").write_text(net())
    put(tmp_path, compiled, *_FLAGS)
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
