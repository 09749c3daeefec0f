"""Connecting an app's ranks: `torch.distributed` is up when `parse_app_args` returns, and not when it need not be."""

import json
import sys
from pathlib import Path

import pytest

from sambasim.samba.context import typed_command
from tests.support.mpi import run_mpi

APP = """\
import json
import sys

import torch.distributed as dist

from sambasim.errors import SambasimError
from sambasim.samba import context, utils
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

    arguments = parse_app_args(common_parser_fn=flags)
except SambasimError as error:
    tell([type(error).__name__, error.what, error.remedy])
    sys.exit(0)
rank = dist.get_rank() if arguments.asks or dist.is_initialized() else -1
world = context.current().communicator
connected = world is not None and context.communicator() is world
told = [rank, utils.get_rank(), utils.get_world_size(), utils.is_main_process(), arguments.world_size, connected]
tell(told)
"""


def told(folder: Path, np: int, *arguments: str) -> list[list[object]]:
    """What each rank of the app tells, sorted."""
    app = folder / "app.py"
    app.write_text(APP, encoding="utf-8")
    result = run_mpi(np, [sys.executable, str(app), *arguments], timeout=90).check()
    assert result.stderr == ""
    return sorted((json.loads(line) for line in result.stdout.splitlines()), key=str)


def test_two_ranks_find_each_other_where_the_run_is_data_parallel(tmp_path: Path) -> None:
    assert told(tmp_path, 2, "run", "--pef", "net", "--data-parallel") == [
        [0, 0, 2, True, 2, True],
        [1, 1, 2, False, 2, True],
    ]


def test_one_rank_has_torch_distributed_too(tmp_path: Path) -> None:
    assert told(tmp_path, 1, "test", "--pef", "net", "--data-parallel") == [[0, 0, 1, True, 1, True]]

    assert told(tmp_path, 1, "run", "--pef", "net") == [[-1, 0, 1, True, 1, False]]  # it asks is_initialized first
    assert told(tmp_path, 1, "run", "--pef", "net", "--asks") == [[0, 0, 1, True, 1, True]]


def test_a_compile_starts_nothing(tmp_path: Path) -> None:
    assert told(tmp_path, 1, "compile", "--data-parallel", "-ws", "3") == [[-1, 0, 1, True, 3, False]]


def test_fewer_ranks_than_were_asked_for_are_refused(tmp_path: Path) -> None:
    [first, second] = told(tmp_path, 2, "measure-performance", "--pef", "net", "--data-parallel", "-ws", "3")
    assert first == second
    assert first[:2] == ["LaunchError", "-ws 3 asks for at least 3 replicas, and 2 were started"]
    assert str(first[2]).startswith("mpirun -np 3 ")


def test_an_app_that_starts_torch_distributed_itself_is_refused(tmp_path: Path) -> None:
    [first, second] = told(tmp_path, 2, "run", "--pef", "net", "--data-parallel", "--alone")
    assert {first[1], second[1]} == {
        f"torch.distributed says rank 0 of 1, and MPI says rank {rank} of 2: "
        "the app has started torch.distributed by itself"
        for rank in (0, 1)
    }


@pytest.mark.parametrize(
    ("original", "typed"),
    [
        (["python3", "app.py", "run"], ["python3", "app.py", "run"]),
        (["/venv/bin/python", "/venv/bin/sambasim", "app", "app.py"], ["sambasim", "app", "app.py"]),
        (["python", "-m", "sambasim", "app.py"], ["python", "-m", "sambasim", "app.py"]),
    ],
)
def test_a_remedy_repeats_what_was_typed(original: list[str], typed: list[str]) -> None:
    assert typed_command(original) == typed
