"""Who keeps a job from going on: judged from what the ranks say of themselves, without any job."""

import pytest

from sambasim.errors import PeerError, StallError
from sambasim.runtime.watch.board import Line, State
from sambasim.runtime.watch.judgement import LEAVING_S, Seen, dead, death, is_stalled, missing, stall
from sambasim.runtime.watch.processes import Process

TIMEOUT_S = 300.0


def seen(
    rank: int,
    state: State = State.WAITING,
    idle_s: float = 301.0,
    *,
    step: int = 17,
    process: Process = Process.THERE,
    at: str = "",
) -> Seen:
    doing = "waiting for peers" if state is State.WAITING else "reading data"
    return Seen(Line(rank, f"node{rank}", 100 + rank, step, 0, state, doing, at), idle_s, process)


def ranks(found: list[Seen]) -> list[int]:
    return [one.line.rank for one in found]


def stalled(*all_ranks: Seen) -> bool:
    """Whether rank 0 finds that the job stands still."""
    return is_stalled(all_ranks[0], all_ranks, TIMEOUT_S)


def test_a_rank_that_waits_long_enough_for_one_that_does_not_move_finds_a_stall() -> None:
    everybody = [seen(0), seen(1, State.RUNNING)]
    assert stalled(*everybody)
    assert ranks(missing(everybody)) == [1]


def test_a_rank_that_moves_is_waited_for() -> None:
    assert not stalled(seen(0), seen(1, State.RUNNING, 2.0))
    assert not stalled(seen(0), seen(1, State.RUNNING), seen(2, State.RUNNING, 2.0))


def test_a_rank_that_has_just_begun_to_wait_finds_nothing() -> None:
    assert not stalled(seen(0, idle_s=2.0), seen(1, State.RUNNING))


def test_a_rank_that_does_not_wait_judges_nobody() -> None:
    assert not stalled(seen(0, State.RUNNING), seen(1, State.RUNNING))


def test_a_rank_that_has_just_come_to_where_all_wait_lets_them_go_on() -> None:
    assert not stalled(seen(0), seen(1, idle_s=0.5))


def test_a_rank_that_waits_only_since_a_moment_ago_hides_no_stall() -> None:
    everybody = [seen(0), seen(1, State.RUNNING), seen(2, idle_s=0.5)]
    assert stalled(*everybody)
    assert ranks(missing(everybody)) == [1]


def test_a_process_that_is_stopped_is_missing_though_it_says_that_it_waits() -> None:
    everybody = [seen(0), seen(1, process=Process.STOPPED), seen(2)]
    assert stalled(*everybody)
    assert ranks(missing(everybody)) == [1]


def test_a_process_that_was_stopped_a_moment_ago_may_go_on() -> None:
    assert not stalled(seen(0), seen(1, idle_s=2.0, process=Process.STOPPED), seen(2))


def test_a_process_that_is_stopped_is_found_by_ranks_that_do_not_say_that_they_wait() -> None:
    everybody = [seen(0, State.RUNNING), seen(1, State.RUNNING, process=Process.STOPPED)]
    assert stalled(*everybody)
    assert ranks(missing(everybody)) == [1]


def test_where_all_wait_those_behind_are_missing() -> None:
    everybody = [seen(0), seen(1, step=16), seen(2)]
    assert stalled(*everybody)
    assert ranks(missing(everybody)) == [1]


def test_a_rank_that_has_ended_does_not_come_any_more() -> None:
    everybody = [seen(0), seen(1, State.ENDED)]
    assert stalled(*everybody)
    assert ranks(missing(everybody)) == [1]


def test_a_rank_that_ends_the_job_is_left_to_do_so() -> None:
    assert not stalled(seen(0), seen(1, State.LEAVING))


def test_a_rank_that_is_busy_is_waited_for_as_long_as_its_process_is_there() -> None:
    assert not stalled(seen(0), seen(1, State.BUSY))
    assert stalled(seen(0), seen(1, State.BUSY, process=Process.STOPPED))


def test_a_host_that_gives_no_answer_is_missing() -> None:
    everybody = [seen(0), seen(1, State.RUNNING, 4.0, process=Process.SILENT)]
    assert stalled(*everybody)
    assert ranks(missing(everybody)) == [1]


@pytest.mark.parametrize("state", [State.RUNNING, State.WAITING, State.BUSY])
def test_a_process_that_is_gone_before_its_end_is_dead(state: State) -> None:
    assert ranks(dead([seen(0), seen(1, state, 0.0, process=Process.GONE)])) == [1]


def test_a_process_that_has_ended_is_not_dead() -> None:
    assert dead([seen(0), seen(1, State.ENDED, process=Process.GONE)]) == []


def test_a_process_out_of_sight_is_not_dead() -> None:
    assert dead([seen(0), seen(1, State.RUNNING, process=Process.UNKNOWN)]) == []


def test_a_rank_that_goes_while_it_ends_the_job_is_dead_only_if_the_job_goes_on() -> None:
    assert dead([seen(0), seen(1, State.LEAVING, 0.5, process=Process.GONE)]) == []
    assert ranks(dead([seen(0), seen(1, State.LEAVING, LEAVING_S, process=Process.GONE)])) == [1]


def test_a_death_is_told_with_what_the_rank_did_last() -> None:
    error = death([seen(1, State.RUNNING, process=Process.GONE)])
    assert type(error) is PeerError
    assert error.rank == 1
    assert str(error).splitlines()[:2] == [
        "rank 1 died without a word",
        "  where: rank 1 on node1 (process 101): step 17, reading data",
    ]


def test_a_stall_is_told_with_all_who_are_missing_and_for_how_long() -> None:
    error = stall([seen(0), seen(1, State.RUNNING, at="net.py:3 in read"), seen(2, State.RUNNING, 400)], TIMEOUT_S)
    assert type(error) is StallError
    assert (error.rank, error.exit_code, error.code) == (1, 4, "stall")
    assert str(error).splitlines() == [
        "ranks 1 and 2 keep the others waiting, for 300.00 s now",
        "  where: rank 1 on node1 (process 101): step 17, reading data for 301.00 s, at net.py:3 in read",
        "         rank 2 on node2 (process 102): step 17, reading data for 400.00 s",
        "  try:   look why that line does not go on; --sync-timeout SECONDS waits longer",
    ]


def test_a_stall_of_ranks_that_all_wait_for_each_other_blames_none() -> None:
    error = stall([seen(0), seen(1)], TIMEOUT_S)
    assert error.rank is None
    assert str(error).startswith("all ranks wait for each other, and nothing has come for 300.00 s")
