"""An app as old public repositories write them: it compiles, trains and is measured unchanged."""

import re
from pathlib import Path

import pytest

from tests.support.mpi import SAMBASIM, Result, mpirun, run_job
from tests.support.whole import whole, whole_case

pytestmark = pytest.mark.usefixtures("fresh")

SCRIPT = str(Path(__file__).with_name("old_names.py"))


def _call(folder: Path, command: str, *flags: str, np: int = 1) -> Result:
    launcher = [mpirun(), "-np", str(np)] if np > 1 else []
    words = [command, *(() if command == "compile" else ("--pef", "out/net/net.pef")), *flags]
    return run_job([*launcher, *SAMBASIM, SCRIPT, *words], timeout=120, cwd=folder).check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    compiled = _call(folder, "compile", "--data-parallel", "-ws", "2", "--pef-name", "net")
    assert "Compilation succeeded" in compiled.stdout
    return folder


@pytest.fixture(scope="module")
def weights(folder: Path) -> str:
    """What one replica prints at its end."""
    printed = _call(folder, "run").stdout
    found = re.search(r"Epoch: 1 Loss: \d+\.\d{4}\n(weights \w{64})\n$", printed)
    assert found, printed
    return found[1]


def test_one_replica_trains_and_saves(weights: str) -> None:
    assert weights


@pytest.mark.parametrize("np", [whole_case(2), whole_case(4)])
def test_replicas_train_equally_by_either_sync(folder: Path, weights: str, np: int) -> None:
    """They get the same samples, so they end where one replica does: the mean of equal gradients is exact."""
    for flags in ((), ("--reduce-on-rdu",)):
        result = _call(folder, "run", "--data-parallel", *flags, np=np)
        assert re.findall(r"weights \w+", result.stdout) == [weights]
        assert re.search(r"DP04: .*same samples", result.stderr), result.stderr


@whole
def test_the_other_commands(folder: Path) -> None:
    assert _call(folder, "test").stdout.endswith("test passed\n")
    assert "samples/s" in _call(folder, "measure-performance").stdout
    assert " BCKWD " in _call(folder, "measure-sections").stdout
