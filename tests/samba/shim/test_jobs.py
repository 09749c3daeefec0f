"""A script that fails as one rank of several ends its whole job."""

import pytest

from tests.samba.shim.conftest import Run
from tests.support.whole import whole_case

JOB = """
import os, sys, time
import sambaflow.samba
from sambasim.errors import DataError
from sambasim.runtime.launcher import launched_rank
from sambasim.samba.context import communicator


rank, how = launched_rank(os.environ), sys.argv[1]
if how == "early" and rank == 1:
    raise ValueError("before it has joined")
communicator()
if how == "alike":
    raise DataError("no data")
if rank == 1:
    if how == "ours":
        raise DataError("no data")
    if how == "own":
        1 / 0
    if how == "exit":
        sys.exit(3)
    if how == "well":
        sys.exit(0)
if how == "well":
    time.sleep(2)
    print("the other goes on")
else:
    communicator().barrier()
    time.sleep(60)
"""


@pytest.mark.parametrize("way", [whole_case("app"), "env"])
@pytest.mark.parametrize(
    ("how", "code", "first", "last"),
    [
        ("ours", 2, "error[data] (rank 1 on ", "script.py:17"),
        whole_case("alike", 2, "error[data] (every rank): no data", "script.py:14"),
        whole_case("own", 1, "the script failed (rank 1 on ", "ZeroDivisionError: division by zero"),
        ("exit", 3, "a rank left while others worked (rank 1 on ", "exit code 3"),
        ("early", 1, "Traceback", "ValueError: before it has joined"),
    ],
)
def test_the_job_ends(run: Run, way: str, how: str, code: int, first: str, last: str) -> None:
    result = run(way, JOB, [how], ranks=2)
    told = result.stderr.strip().splitlines()
    assert told[0].startswith(first)
    assert told[-1].endswith(last)
    assert (result.returncode, result.stdout) == (code, "")


GROUPED = """
import sys
from sambasim import samba
from sambasim.samba.utils.argparser import parse_app_args

parse_app_args(sys.argv[1:])
1 / 0
"""


@pytest.mark.parametrize("way", [whole_case("app"), "env"])
def test_an_error_is_told_where_torch_distributed_is_up_too(run: Run, way: str) -> None:
    result = run(way, GROUPED, ["run", "--pef", "any", "--data-parallel"], ranks=2)
    told = result.stderr.strip().splitlines()
    assert told[0] == "the script failed (every rank)"
    assert told[-1] == "ZeroDivisionError: division by zero"
    assert (result.returncode, result.stdout) == (1, "")


@pytest.mark.parametrize("way", [whole_case("app"), "env"])
def test_a_rank_that_has_come_to_its_end_just_goes(run: Run, way: str) -> None:
    result = run(way, JOB, ["well"], ranks=2)
    assert (result.returncode, result.stdout, result.stderr) == (0, "the other goes on\n", "")
