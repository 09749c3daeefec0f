"""Pipeline schedules: those with a name have the published bubble and memory; what cannot run is refused."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import OptionError
from sambasim.ir.schedule import (
    SCHEDULES,
    Schedule,
    bubble,
    check,
    draw,
    in_flight,
    make,
    read_csv,
    timeline,
    unit_cost,
)

DEADLOCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
MOVES = "move 1B0 to before 1F1 or 0F1 to before 0B0"
IN_LAST_TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n"


@st.composite
def named(draw_: st.DrawFn) -> Schedule:
    name = draw_(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw_(st.integers(1, 6))
    step = ranks if name == "interleaved-1f1b" else 1
    return make(name, ranks, draw_(st.sampled_from(range(ranks, 13, step))))


def read(text: str, folder: Path, name: str = "mine.csv") -> Schedule:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_csv(path)


@pytest.mark.parametrize(
    ("name", "percent", "most"),
    [
        ("gpipe", 27.3, [8, 8, 8, 8]),
        ("1f1b", 27.3, [4, 3, 2, 1]),
        ("interleaved-1f1b", 15.8, [11, 9, 7, 5]),
        ("zb-h1", 11.1, [4, 4, 4, 4]),
    ],
)
def test_bubble_and_memory_of_four_ranks_and_eight_micro_batches(name: str, percent: float, most: list[int]) -> None:
    schedule = make(name, 4, 8)
    assert round(100 * bubble(schedule), 1) == percent
    assert in_flight(schedule) == most


@given(named())
def test_a_named_schedule_runs_with_the_bubble_of_its_formula(schedule: Schedule) -> None:
    check(schedule)
    assert all({one.stage for one in row} == {*schedule.stages_of(rank)} for rank, row in enumerate(schedule.rows))
    work = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 3}[schedule.name] * schedule.micro_batches
    assert bubble(schedule) == pytest.approx((schedule.ranks - 1) / (work + schedule.ranks - 1))
    assert schedule.splits_backward == (schedule.name == "zb-h1")
    if schedule.name == "1f1b":
        assert in_flight(schedule) == list(range(schedule.ranks, 0, -1))
    if schedule.name == "zb-h1":
        assert max(in_flight(schedule)) == schedule.ranks


@given(named())
def test_csv_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = "\n".join(",".join(map(str, row)) for row in schedule.rows)
    assert read(text, folder, f"{schedule.name}.csv") == schedule


@given(named(), st.randoms(use_true_random=False))
def test_a_changed_order_runs_or_is_refused(schedule: Schedule, random: Random) -> None:
    rows = [list(row) for row in schedule.rows]
    row = rows[random.randrange(len(rows))]
    row.insert(random.randrange(len(row)), row.pop(random.randrange(len(row))))
    changed = replace(schedule, rows=tuple(map(tuple, rows)))
    try:
        check(changed)
    except OptionError:
        return
    spans = [span for row in timeline(changed, unit_cost) for span in row]
    stops = {action: stop for action, _, stop in spans}
    assert len(stops) == sum(map(len, schedule.rows))
    assert all(stops[need] <= start for action, start, _ in spans for need in changed.needs(action))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_one_micro_batch_runs_through_the_stages_in_turn(name: str) -> None:
    schedule = make(name, 3, 1)
    check(schedule)
    assert in_flight(schedule) == [1, 1, 1]


def test_an_action_starts_when_its_rank_is_free_and_what_it_needs_is_done() -> None:
    spans = timeline(make("1f1b", 2, 2), lambda action: {"F": 0.5, "B": 2.0}[action.kind] * (1 + action.stage))
    assert [[(str(action), start, stop) for action, start, stop in row] for row in spans] == [
        [("0F0", 0, 0.5), ("0F1", 0.5, 1), ("0B0", 5.5, 7.5), ("0B1", 10.5, 12.5)],
        [("1F0", 0.5, 1.5), ("1B0", 1.5, 5.5), ("1F1", 5.5, 6.5), ("1B1", 6.5, 10.5)],
    ]


def test_cells_are_those_of_pytorch() -> None:
    from torch.distributed.pipelining import schedules

    for name in SCHEDULES:
        for action in (action for row in make(name, 2, 4).rows for action in row):
            theirs = schedules._Action.from_str(str(action))
            assert str(theirs) == str(action)
            assert (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.micro_batch)


def test_idle_cells_and_blanks_are_dropped(tmp_path: Path) -> None:
    schedule = read("0F0,,, 0B0\r\n,1F0,1B0,\r\n\r\n", tmp_path)
    assert (schedule.name, schedule.stages, schedule.micro_batches) == ("mine", 2, 1)
    assert [[str(action) for action in row] for row in schedule.rows] == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_a_rank_may_have_three_stages(tmp_path: Path) -> None:
    schedule = read("0F0,1F0,2F0,2B0,1B0,0B0\n", tmp_path)
    assert (schedule.stages, list(schedule.stages_of(0)), bubble(schedule)) == (3, [0, 1, 2], 0)


def test_drawing() -> None:
    assert draw(make("1f1b", 2, 3)).splitlines() == [
        "1f1b: 2 stages on 2 ranks, 3 micro-batches, 25.0 % idle if F, I and W take one step and B two",
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---  2 forwards in flight",
        "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .   1 forward in flight",
    ]
    assert draw(make("zb-h1", 2, 2)).splitlines()[1:] == [
        "rank 0  F0 F1 .  I0 W0 I1 W1  2 forwards in flight",
        "rank 1  .  F0 I0 F1 I1 W0 W1  2 forwards in flight",
    ]
    assert "rank 1  .   1F0 1F1 3F0 3B0---- " in draw(make("interleaved-1f1b", 2, 4))


@pytest.mark.parametrize(
    ("text", "what", "where", "remedy"),
    [
        ("", "the schedule has no actions", "", "row of actions for each rank"),
        (",,\n", "the schedule has no actions", "", "row of actions for each rank"),
        ("0F0,0B0\n1F0,1FB0\n", "1FB0 is no action", "row 2, cell 2", "as in 2F0"),
        ("0F0,0SEND_F0,0B0\n", "0SEND_F0 is no action", "row 1, cell 2", "compute_only"),
        ("0F0,0F-1\n", "0F-1 is no action", "row 1, cell 2", "as in 2F0"),
        ("0F0,0F1234567890\n", "0F1234567890 is no action", "row 1, cell 2", "as in 2F0"),
        ("0F0,0B0\n1F0\n", "1B0 is missing", "row 2 (rank 1)", "needs F, B of every micro-batch, 0 to 0"),
        ("0F0,0F1,0B0\n", "0B1 is missing", "row 1 (rank 0)", "0 to 1"),
        ("0F0,0I0\n", "0W0 is missing", "row 1 (rank 0)", "needs F, I, W"),
        ("0F0,999999999F999999999\n", "0F1 is missing", "row 1", "every stage, 0 to 999999999"),
        ("0F0,0B0,0F0\n", "0F0 is there twice", "row 1 (rank 0)", "remove one"),
        ("0F0,1F0,0B0\n1B0\n", "1F0 is on rank 0, but stage 1 is on rank 1", "row 1 (rank 0)", "move 1F0 to row 2"),
        ("0F0,2F0,2B0,0B0\n1F0,1B0\n", "stages, 3, is no multiple of the number of ranks, 2", "row 2", "same number"),
        ("0F0,0B0\n,\n1F0\n", "1F0 is on rank 2, but stage 1 is on rank 1", "row 3 (rank 2)", "move 1F0 to row 2"),
        ("0F1,0F0,0B0,0B1\n", "0F1 is before 0F0", "row 1 (rank 0)", "move 0F0 to before 0F1"),
        ("0F0,0F1,0B1,0B0\n", "0B1 is before 0B0", "row 1 (rank 0)", "move 0B0 to before 0B1"),
        ("0F0,0B0,0F1,0I1,0W1\n", "whole, such as 0B0, and others are split, such as 0I1", "row 1", "B for every"),
        ("0F0,0W0,0I0\n", "0W0 is before 0I0, which it needs", "row 1 (rank 0)", "move 0I0 to before 0W0"),
        ("0B0,0F0\n", "0B0 is before 0F0, which it needs", "row 1 (rank 0)", "move 0F0 to before 0B0"),
        ("0F0,0B0,1F0,1B0\n", "0B0 is before 1B0, which it needs", "row 1 (rank 0)", "move 1B0 to before 0B0"),
        (DEADLOCK, "0B0 on rank 0 waits for 1B0; 1F1 on rank 1 waits for 0F1", "rows 1, 2", MOVES),
        (IN_LAST_TWO, "1B0 on rank 1 waits for 2B0; 2F1 on rank 2 waits", "rows 2, 3", "move 2B0 to before 2F1"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, text: str, what: str, where: str, remedy: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(text, tmp_path)
    assert what in caught.value.what
    assert str(tmp_path / "mine.csv") in str(caught.value.where)
    assert where in str(caught.value.where)
    assert remedy in str(caught.value.remedy)


def test_what_the_remedy_for_a_deadlock_says_works(tmp_path: Path) -> None:
    for cured in (DEADLOCK.replace("1F1,1B0", "1B0,1F1"), DEADLOCK.replace("0B0,0F1", "0F1,0B0")):
        check(read(cured, tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"\xff", "not UTF-8"), (b"0F0," * (1 << 18) + b"0", "more than 1")]
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=reason) as caught:
        read_csv(path)
    assert "gpipe | 1f1b | interleaved-1f1b | zb-h1 | FILE.csv" in str(caught.value.remedy)


def test_numbers_that_a_named_schedule_cannot_take_are_refused() -> None:
    with pytest.raises(OptionError, match="a multiple of 4 micro-batches on 4 ranks, got 6") as caught:
        make("interleaved-1f1b", 4, 6)
    assert caught.value.remedy == "--micro-batches 8, or --schedule 1f1b"
    with pytest.raises(OptionError, match="there is no schedule 1f2b"):
        make("1f2b", 4, 8)
