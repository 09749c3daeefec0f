"""Connecting an app's ranks: `torch.distributed` is up when `parse_app_args` returns, and not when it need not be."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
ONE_RANK: Mapping[Sequence[str], list[object]] = {
    ("test", *DATA_PARALLEL): [0, 0, 1, True, 1, True],
    ("run", "--pef", "net"): [-1, 0, 1, True, 1, False],  # it asks is_initialized first
    ("run", "--pef", "net", "--asks"): [0, 0, 1, True, 1, True],
    ("compile", "--data-parallel", "-ws", "3"): [-1, 0, 1, True, 3, False],
    # A world size that the app declares is neither checked nor changed.
    ("run", *DATA_PARALLEL, "--own"): [0, 0, 1, True, None, True],
    ("run", *DATA_PARALLEL, "--own", "--world-size", "7"): [0, 0, 1, True, 7, True],
}
"""What one rank prints, by command line."""

TWO_RANKS = [
    ("run", *DATA_PARALLEL, "--alone"),
    ("measure-performance", *DATA_PARALLEL, "-ws", "3"),
    ("run", *DATA_PARALLEL),
]


def test_ranks_find_each_other_where_the_run_is_data_parallel_or_are_refused(tmp_path: Path) -> None:
    """Each command line of one rank has a process of its own; those of two ranks are parsed one after another."""
    app = tmp_path / "app.py"
    app.write_text(APP, encoding="utf-8")

    def printed(result: Result) -> list[list[object]]:
        assert result.check().stderr == ""
        return [json.loads(line) for line in result.stdout.splitlines()]

    jobs = json.dumps([*ONE_RANK])
    alone = printed(run_job([sys.executable, str(app), "forked", jobs], timeout=90))
    assert dict(zip(ONE_RANK, alone, strict=True)) == ONE_RANK
    lines = printed(run_mpi(2, [sys.executable, str(app), "in turn", json.dumps(TWO_RANKS)], timeout=90))
    joined = sorted(line for line in lines if line[0] != "LaunchError")
    assert joined == [[0, 0, 2, True, 2, True], [1, 1, 2, False, 2, True]]
    too_few, again, *own = sorted((line for line in lines if line[0] == "LaunchError"), key=str)
    assert too_few == again
    assert too_few[1] == "-ws 3 asks for at least 3 replicas, and 2 were started"
    assert str(too_few[2]).startswith("mpirun -np 3 ")
    assert [line[1] for line in own] == [
        f"torch.distributed says rank 0 of 1, and MPI says rank {rank} of 2: "
        "the app has started torch.distributed by itself"
        for rank in (0, 1)
    ]
