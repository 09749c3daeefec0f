"""Connecting an app's ranks: `torch.distributed` is up when `parse_app_args` returns, and not when it need not be."""

import json
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.support.mpi import Result, run_job, run_mpi

APP = """\
import gc
import json
import os
import sys

import torch.distributed as dist

from sambasim.errors import SambasimError
from sambasim.samba import ending, process, utils
from sambasim.samba.utils.argparser import parse_app_args


def told(words):
    if "--alone" in words:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def flags(parser):
        parser.add_argument("--alone", action="store_true")
        parser.add_argument("--asks", action="store_true")
        if "--own" in words:
            parser.add_argument("--own", action="store_true")
            parser.add_argument("--world-size", type=int)

    try:
        arguments = parse_app_args(words, common_parser_fn=flags)
    except SambasimError as error:
        if "--alone" in words:
            dist.destroy_process_group()
        return [type(error).__name__, error.what, error.remedy]
    if arguments.asks:
        dist.barrier()
    rank = dist.get_rank() if dist.is_initialized() else -1
    world = process.current().communicator
    connected = world is not None and ending.communicator() is world
    return [rank, utils.get_rank(), utils.get_world_size(), utils.is_main_process(), arguments.world_size, connected]


assert "mpi4py" not in sys.modules
gc.freeze()  # else each process would go through all of it as it ends
how, jobs = sys.argv[1:]
for words in json.loads(jobs):
    if how == "forked" and os.fork():
        _, status = os.wait()
        assert status == 0, words
        continue
    sys.stdout.write(json.dumps(told(words)) + "\\n")  # one write: mpirun mixes what the ranks print
    sys.stdout.flush()
    if how == "forked":
        sys.exit()
"""

DATA_PARALLEL = ("--pef", "net", "--data-parallel")
ONE_RANK: Mapping[str, Sequence[str]] = {
    "one rank": ("test", *DATA_PARALLEL),
    "alone": ("run", "--pef", "net"),  # it asks is_initialized first
    "alone, asks": ("run", "--pef", "net", "--asks"),
    "compile": ("compile", "--data-parallel", "-ws", "3"),
    "own world size": ("run", *DATA_PARALLEL, "--own"),
    "own world size, typed": ("run", *DATA_PARALLEL, "--own", "--world-size", "7"),
}
TWO_RANKS: Mapping[str, Sequence[str]] = {
    "own process group": ("run", *DATA_PARALLEL, "--alone"),
    "too few": ("measure-performance", *DATA_PARALLEL, "-ws", "3"),
    "two ranks": ("run", *DATA_PARALLEL),
}

Told = Mapping[str, list[list[object]]]
"""By command line what the ranks print, sorted."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Each command line of one rank has a process of its own; those of two ranks are parsed one after another."""
    app = tmp_path_factory.mktemp("context") / "app.py"
    app.write_text(APP, encoding="utf-8")

    def printed(result: Result) -> list[list[object]]:
        assert result.check().stderr == ""
        return [json.loads(line) for line in result.stdout.splitlines()]

    def command(how: str, jobs: Mapping[str, Sequence[str]]) -> list[str]:
        return [sys.executable, str(app), how, json.dumps([*jobs.values()])]

    alone = printed(run_job(command("forked", ONE_RANK), timeout=90))
    together = printed(run_mpi(2, command("in turn", TWO_RANKS), timeout=90))
    return {name: [line] for name, line in zip(ONE_RANK, alone, strict=True)} | {
        "own process group": sorted((line for line in together if "says rank" in str(line)), key=str),
        "too few": [line for line in together if "at least 3" in str(line)],
        "two ranks": sorted(line for line in together if line[0] != "LaunchError"),
    }


def test_two_ranks_find_each_other_where_the_run_is_data_parallel(told: Told) -> None:
    assert told["two ranks"] == [[0, 0, 2, True, 2, True], [1, 1, 2, False, 2, True]]
    assert told["one rank"] == told["alone, asks"] == [[0, 0, 1, True, 1, True]]
    assert told["alone"] == [[-1, 0, 1, True, 1, False]]
    assert told["compile"] == [[-1, 0, 1, True, 3, False]]
    # A world size that the app declares is neither checked nor changed.
    assert told["own world size"] == [[0, 0, 1, True, None, True]]
    assert told["own world size, typed"] == [[0, 0, 1, True, 7, True]]


def test_fewer_ranks_than_were_asked_for_are_refused(told: Told) -> None:
    first, second = told["too few"]
    assert first == second
    assert first[:2] == ["LaunchError", "-ws 3 asks for at least 3 replicas, and 2 were started"]
    assert str(first[2]).startswith("mpirun -np 3 ")


def test_an_app_that_starts_torch_distributed_itself_is_refused(told: Told) -> None:
    assert [line[1] for line in told["own process group"]] == [
        f"torch.distributed says rank 0 of 1, and MPI says rank {rank} of 2: "
        "the app has started torch.distributed by itself"
        for rank in (0, 1)
    ]
