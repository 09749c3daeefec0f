"""The board of a node: what a rank writes is what the others and a person read, and only it."""

from pathlib import Path

import pytest

from sambasim.errors import MachineError
from sambasim.runtime.watch import board
from sambasim.runtime.watch.board import LINE_BYTES, Board, Line, State


@pytest.fixture
def of_three(tmp_path: Path) -> Board:
    """A board of three ranks, of which two have begun."""
    made = board.create([tmp_path], "net-ranks-host-1.txt", 3)
    for index, rank in enumerate((4, 5)):
        made.writer(index).begin(rank, f"node{rank}", 1000 + rank)
    return made


def test_what_a_rank_writes_is_read_by_who_attaches(of_three: Board) -> None:
    writer = of_three.writer(1)
    writer.step(17)
    writer.micro_step(2)
    writer.does(board.prepare(State.WAITING, "waiting for peers"))
    writer.at("/home/you/net.py:12 in __getitem__")
    expected = Line(5, "node5", 1005, 17, 2, State.WAITING, "waiting for peers", "/home/you/net.py:12 in __getitem__")
    assert board.attach(of_three.path, 3).lines()[1] == expected
    assert board.read(of_three.path)[1] == expected


def test_a_rank_writes_its_own_line_alone(of_three: Board) -> None:
    before = of_three.path.read_bytes()
    writer = of_three.writer(1)
    writer.step(9)
    writer.does(board.prepare(State.RUNNING, "x" * 500))
    writer.at("y" * 5000)
    after = of_three.path.read_bytes()
    assert len(after) == len(before) == 4 * LINE_BYTES
    lines = [(one, other) for one, other in zip(before.splitlines(), after.splitlines(), strict=True) if one != other]
    assert lines == [(before.splitlines()[2], after.splitlines()[2])]


def test_a_person_reads_it_as_columns(of_three: Board) -> None:
    of_three.writer(0).step(3)
    headings, first, *_ = of_three.path.read_text().splitlines()
    assert headings.split()[:7] == ["rank", "host", "pid", "step", "micro", "state", "doing"]
    assert first.split() == ["4", "node4", "1004", "3", "running", "starting"]
    assert headings.index("doing") == first.index("starting")


def test_a_line_says_the_step_where_there_is_one() -> None:
    line = Line(1, "node1", 7, 0, 0, State.RUNNING, "opening the data")
    assert str(line) == "opening the data"
    assert str(Line(1, "node1", 7, 17, 0, State.RUNNING, "reading data")) == "step 17, reading data"
    assert str(Line(1, "node1", 7, 17, 2, State.RUNNING, "reading data")) == "step 17, micro-step 2, reading data"


def test_a_rank_that_has_not_begun_has_no_process(of_three: Board) -> None:
    assert [line.pid for line in of_three.lines()] == [1004, 1005, 0]


def test_names_that_are_no_ascii_and_long_ones_stay_in_their_columns(tmp_path: Path) -> None:
    made = board.create([tmp_path], "b.txt", 1)
    made.writer(0).begin(0, "höst-" + "x" * 100, 1)
    made.writer(0).at("/a/" + "b" * 300 + "/net.py:12 in read")
    (line,) = made.lines()
    assert (line.pid, line.state, line.doing) == (1, State.RUNNING, "starting")
    assert line.host_name.startswith("h?st-x")
    assert line.at.startswith("...bb")
    assert line.at.endswith("b/net.py:12 in read")


def test_a_line_that_is_just_being_written_can_be_read(of_three: Board) -> None:
    raw = bytearray(of_three.path.read_bytes())
    at = raw.index(b"running", 2 * LINE_BYTES)
    raw[at : at + 7] = b"rainnng"
    of_three.path.write_bytes(raw)
    assert of_three.lines()[1].state is State.RUNNING


def test_a_folder_that_takes_no_file_gives_way_to_the_next(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    made = board.create([file, Path("/proc"), tmp_path / "new"], "b.txt", 2)
    assert made.path == tmp_path / "new" / "b.txt"


def test_where_no_folder_takes_a_file_each_is_named_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(MachineError, match="no place for the file") as caught:
        board.create([file], "b.txt", 2)
    assert f"{file}: " in caught.value.what
    assert caught.value.remedy is not None
    assert "--log-dir" in caught.value.remedy


def test_a_board_that_one_rank_cannot_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="this one cannot write to it: No such file"):
        board.attach(tmp_path / "none.txt", 2)


def test_it_has_a_name_of_its_own_for_each_host_and_run() -> None:
    assert board.name_of("net", "node7.cluster", 12) == "net-ranks-node7.cluster-12.txt"
    assert board.name_of("", "a/b", 12) == "ranks-a_b-12.txt"


def test_it_can_still_be_written_when_its_file_is_gone(of_three: Board) -> None:
    of_three.path.unlink()
    of_three.writer(0).step(2)
    assert of_three.lines()[0].step == 2
