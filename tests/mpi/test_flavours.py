"""The MPI that is there: that it is the one that was chosen, and that the quick start is exact on it.

`make test-mpis` runs the MPI tests on three MPIs, and `make test` runs this file on the two that it does not use
itself.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.command import sambasim
from tests.mpi.training import run_of, train
from tests.support.mpi import SAMBASIM, can_play_hosts, library, mpirun, run_mpi

_CHOSEN = os.environ.get("SAMBASIM_TEST_MPI")
_SLOW_FIRST = """
import os, time
from sambasim.cli.main import main
from sambasim.runtime.machine.launcher import launched_rank
if launched_rank() == 0:
    time.sleep(1)
main()
"""


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    sambasim(["compile", "--data-parallel", "-ws", "2", "--pef-name", "digits"], folder).check()
    return folder / "out" / "digits" / "digits.pef"


def test_ranks_run_on_the_mpi_that_was_chosen_and_so_does_mpirun() -> None:
    body = (
        "from sambasim.runtime.machine.mpi import connect\n"
        "c = connect(['body'])\n"
        "found = c.gather_object(c.library)\n"
        "print('\\n'.join(found) if found else '', end='')\n"
    )
    assert run_mpi(2, [sys.executable, "-c", body]).check().stdout.split("\n") == [library()] * 2
    if _CHOSEN is not None:
        assert library().replace(" ", "").lower() == _CHOSEN.replace("-", "")
    banner = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"(?:Version:|\(Open MPI\))\s+(\S+)", banner)
    assert version is not None, banner
    assert version[1] == library().split()[-1]


def test_an_error_of_all_ranks_is_printed_once_though_rank_0_is_the_last() -> None:
    result = run_mpi(2, [sys.executable, "-c", _SLOW_FIRST, "run", "--pef", "net", "--no-such-flag"])
    assert result.stderr.count("error[usage]: No such option") == 1
    assert result.returncode == 2


def test_the_quick_start_ends_with_the_same_weights_by_every_sync(pef: Path) -> None:
    ways: dict[str, dict[str, Any]] = {"device": {"reduce_on_rdu": True}, "host": {}, "emulated": {"emulate": 2}}
    found = train(2, [run_of(way, pef, steps=20, **how) for way, how in ways.items()])
    device, host, emulated = (found[way].summary for way in ways)
    assert (device.sync, host.sync, emulated.sync) == ("device", "host", "emulated")
    assert device.mpi == host.mpi == library()
    assert device.weights_sha256 == host.weights_sha256 == emulated.weights_sha256
    assert device.state_sha256 == host.state_sha256 == emulated.state_sha256


@pytest.mark.skipif(not can_play_hosts(), reason="it takes the privilege to change the host name of a process")
def test_the_quick_start_ends_with_the_same_weights_over_two_hosts(pef: Path) -> None:
    command = ["run", "--pef", str(pef), "--steps", "20", "--threads", "1", "--json"]
    device = run_mpi(4, [*SAMBASIM, *command, "--reduce-on-rdu"], hosts=2).summary
    emulated = sambasim([*command, "--emulate-replicas", "4"], pef.parent).summary
    assert device.bytes.network > 0
    assert device.weights_sha256 == emulated.weights_sha256
