"""An error on any rank ends the job soon, with one message, the right exit code, and nothing left behind."""

import sys
from collections.abc import Mapping

import pytest

from tests.support.mpi import ROOT, Result, run_mpi

BODY = ROOT / "tests" / "mpi" / "bodies" / "fail.py"
BOUND_S = 10.0  # five seconds for the ending, as many for a busy machine to start three processes


def fail(way: str, env: Mapping[str, str] | None = None) -> Result:
    result = run_mpi(3, [sys.executable, str(BODY), way], env=env, timeout=30)
    assert result.elapsed_s < BOUND_S
    assert "Traceback" not in result.stderr
    return result


def told(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("TOLD")]


@pytest.mark.parametrize("env", [{}, {"MPIR_CVAR_NUM_CLIQUES": "2"}], ids=["one node", "two nodes"])
def test_one_rank_raises_while_others_wait_in_a_collective(env: dict[str, str]) -> None:
    result = fail("one_raises", env)
    assert told(result) == ["TOLD rank=2 alike=False DataError('the shard of this rank is empty')"]
    assert result.returncode == 2


def test_one_rank_raises_while_others_compute() -> None:
    result = fail("one_raises_while_others_compute")
    assert told(result) == ["TOLD rank=1 alike=False ZeroDivisionError('division by zero')"]
    assert result.returncode == 70


def test_what_all_ranks_have_alike_is_told_once_and_without_an_abort() -> None:
    result = fail("all_raise_alike")
    assert told(result) == ["TOLD rank=0 alike=True LaunchError('too few replicas')"]
    assert "bort" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2


def test_all_ranks_fail_each_in_its_own_words() -> None:
    result = fail("all_raise_otherwise")
    assert told(result) == ["TOLD rank=0 alike=False DataError('there is no file 0.npz')"]
    assert result.returncode == 2


def test_several_ranks_fail_at_one_time() -> None:
    result = fail("some_raise")
    assert told(result) == ["TOLD rank=0 alike=False DataError('there is no file 0.npz')"]
    assert result.returncode == 2


def test_the_rank_that_failed_first_tells_not_those_that_noticed() -> None:
    result = fail("one_raises_and_the_others_blame_it")
    assert told(result) == ["TOLD rank=1 alike=False DataError('the shard of this rank is empty')"]
    assert result.returncode == 2


@pytest.mark.parametrize(("way", "code", "exit_code"), [("one_exits", 3, 3), ("one_exits_well", 0, 1)])
def test_one_rank_exits_while_others_wait(way: str, code: int, exit_code: int) -> None:
    result = fail(way)
    assert told(result) == [f"TOLD rank=1 alike=False SystemExit({code})"]
    assert result.returncode == exit_code, "a job that lost a rank has not succeeded"


@pytest.mark.parametrize(("way", "exit_code"), [("all_exit", 3), ("all_exit_well", 0)])
def test_all_ranks_exit(way: str, exit_code: int) -> None:
    result = fail(way)
    assert (told(result), result.returncode) == ([], exit_code)


def test_a_rank_is_killed() -> None:
    result = fail("one_is_killed")
    assert result.returncode != 0


def test_no_rank_fails() -> None:
    result = fail("none_fails")
    assert (result.stdout, told(result), result.returncode) == ("the block ended\n", [], 0)


def test_alone_the_error_just_escapes() -> None:
    result = run_mpi(1, [sys.executable, str(BODY), "all_raise_alike"])
    assert told(result) == []
    assert "sambasim.errors.LaunchError: too few replicas" in result.stderr
