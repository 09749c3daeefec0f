"""A few of the strikes; `python -m tests.faults.strikes` has the whole matrix."""

import signal
from pathlib import Path

import pytest

from tests.faults.strikes import MATRIX, Strike, prepare, wrong
from tests.support.mpi import is_open_mpi
from tests.support.whole import whole_case

BY_DEFAULT = {
    Strike("start", signal.SIGINT, "rank", 2),
    Strike("middle", signal.SIGTERM, "all", 2),
    Strike("save", signal.SIGUSR1, "mpirun", 0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strikes")
    prepare(folder)
    return folder


@pytest.mark.parametrize("strike", [one if one in BY_DEFAULT else whole_case(one) for one in MATRIX], ids=str)
def test_a_run_that_is_asked_to_stop_saves_and_leaves_nothing(strike: Strike, folder: Path) -> None:
    if is_open_mpi():
        pytest.skip("Open MPI kills its ranks half a second after a signal")
    assert not [*wrong(strike, folder)]
