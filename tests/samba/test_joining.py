"""Connecting an app's ranks: `torch.distributed` is up when `parse_app_args` returns, and not when it need not be."""

import json
import sys
from collections.abc import Mapping

import pytest

from tests.support.mpi import Result, run_job, run_mpi

APP = """\
import json
import sys

import torch.distributed as dist

from sambasim.errors import SambasimError
from sambasim.samba import ending, process, utils
from sambasim.samba.utils.argparser import parse_app_args


def tell(told):
    sys.stdout.write(json.dumps(told) + "\\n")  # one write: mpirun mixes what the ranks print
    sys.stdout.flush()


assert "mpi4py" not in sys.modules
if "--alone" in sys.argv:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
try:
    def flags(parser):
        parser.add_argument("--alone", action="store_true")
        parser.add_argument("--asks", action="store_true")
        if "--own" in sys.argv:
            parser.add_argument("--own", action="store_true")
            parser.add_argument("--world-size", type=int)

    arguments = parse_app_args(common_parser_fn=flags)
except SambasimError as error:
    tell([type(error).__name__, error.what, error.remedy])
    sys.exit(0)
rank = dist.get_rank() if arguments.asks or dist.is_initialized() else -1
world = process.current().communicator
connected = world is not None and ending.communicator() is world
told = [rank, utils.get_rank(), utils.get_world_size(), utils.is_main_process(), arguments.world_size, connected]
tell(told)
"""


EACH_FORKED = """\
import gc
import json
import os
import runpy
import sys

import torch.distributed

from sambasim.samba.utils import argparser

gc.freeze()  # else each process would go through all of it as it ends
_, app, commands = sys.argv
for arguments in json.loads(commands):
    if os.fork() == 0:
        sys.argv[:] = [app, *arguments]
        runpy.run_path(app, run_name="__main__")
        sys.exit()
    _, status = os.wait()
    assert status == 0, arguments
"""
"""Runs the app once for each list of arguments, in a process that has imported torch before."""


DATA_PARALLEL = ("--pef", "net", "--data-parallel")
JOBS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "two ranks": (2, ("run", *DATA_PARALLEL)),
    "one rank": (1, ("test", *DATA_PARALLEL)),
    "alone": (1, ("run", "--pef", "net")),  # it asks is_initialized first
    "alone, asks": (1, ("run", "--pef", "net", "--asks")),
    "compile": (1, ("compile", "--data-parallel", "-ws", "3")),
    "too few": (2, ("measure-performance", *DATA_PARALLEL, "-ws", "3")),
    "own process group": (2, ("run", *DATA_PARALLEL, "--alone")),
    "own world size": (1, ("run", *DATA_PARALLEL, "--own")),
    "own world size, typed": (1, ("run", *DATA_PARALLEL, "--own", "--world-size", "7")),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[list[object]]]:
    """What the ranks of each job print, sorted. Those of one rank are in one process."""
    app = tmp_path_factory.mktemp("context") / "app.py"
    app.write_text(APP, encoding="utf-8")

    def printed(result: Result) -> list[list[object]]:
        assert result.check().stderr == ""
        return [json.loads(line) for line in result.stdout.splitlines()]

    told = {
        name: sorted(printed(run_mpi(np, [sys.executable, str(app), *arguments], timeout=90)), key=str)
        for name, (np, arguments) in JOBS.items()
        if np > 1
    }
    alone = {name: arguments for name, (np, arguments) in JOBS.items() if np == 1}
    in_turn = run_job([sys.executable, "-c", EACH_FORKED, str(app), json.dumps([*alone.values()])], timeout=90)
    return told | {name: [line] for name, line in zip(alone, printed(in_turn), strict=True)}


Told = Mapping[str, list[list[object]]]


def test_two_ranks_find_each_other_where_the_run_is_data_parallel(told: Told) -> None:
    assert told["two ranks"] == [[0, 0, 2, True, 2, True], [1, 1, 2, False, 2, True]]
    assert told["one rank"] == told["alone, asks"] == [[0, 0, 1, True, 1, True]]
    assert told["alone"] == [[-1, 0, 1, True, 1, False]]
    assert told["compile"] == [[-1, 0, 1, True, 3, False]]


def test_fewer_ranks_than_were_asked_for_are_refused(told: Told) -> None:
    first, second = told["too few"]
    assert first == second
    assert first[:2] == ["LaunchError", "-ws 3 asks for at least 3 replicas, and 2 were started"]
    assert str(first[2]).startswith("mpirun -np 3 ")


def test_a_world_size_that_the_app_declares_is_neither_checked_nor_changed(told: Told) -> None:
    assert told["own world size"] == [[0, 0, 1, True, None, True]]
    assert told["own world size, typed"] == [[0, 0, 1, True, 7, True]]


def test_an_app_that_starts_torch_distributed_itself_is_refused(told: Told) -> None:
    first, second = told["own process group"]
    assert {first[1], second[1]} == {
        f"torch.distributed says rank 0 of 1, and MPI says rank {rank} of 2: "
        "the app has started torch.distributed by itself"
        for rank in (0, 1)
    }
