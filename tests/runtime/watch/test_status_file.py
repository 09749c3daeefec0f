"""The status file of a node: each rank writes its own line only, and other ranks and people can read it."""

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from sambasim.errors import MachineError
from sambasim.runtime.watch.status_file import LINE_BYTES, RankStatus, State, StatusFile, name_of, prepare


@pytest.fixture
def three_ranks(tmp_path: Path) -> StatusFile:
    made = StatusFile.create([tmp_path], "net-ranks-host-1.txt", 3)
    made.activity(0).begin(4, "node4", 1004)
    made.activity(1).begin(5, "node5", 1005)
    return made


def test_others_read_what_a_rank_writes_also_when_the_file_is_removed(three_ranks: StatusFile) -> None:
    activity, other = three_ranks.activity(1), StatusFile.attach(three_ranks.path)
    activity.step(17)
    activity.micro_step(2)
    activity.waits("waiting for peers")
    activity.at("/home/you/net.py:12 in read")
    three_ranks.activity(2).begin(6, "node6", 1006, "dp 16383, pp 63, tp 63")
    expected = RankStatus(5, "node5", 1005, 17, 2, State.WAITING, "waiting for peers", "/home/you/net.py:12 in read")
    assert other.ranks()[1] == expected
    assert [(status.pid, status.mesh) for status in other.ranks()[::2]] == [
        (1004, ""),
        (1006, "dp 16383, pp 63, tp 63"),
    ]
    headings, first, _, last = three_ranks.path.read_text().splitlines()
    assert headings.split()[:7] == ["rank", "host", "pid", "step", "micro", "state", "doing"]
    assert first.split() == ["4", "node4", "1004", "running", "starting"]
    assert headings.index("doing") == first.index("starting")
    assert headings.index("mesh") == last.index("dp 16383")
    three_ranks.path.unlink()
    activity.state(State.ENDED)
    activity.step(0)
    assert (other.ranks()[1].state, other.ranks()[1].step) == (State.ENDED, 0)


def test_long_texts_stay_in_the_line_of_their_rank(three_ranks: StatusFile) -> None:
    before = three_ranks.path.read_bytes()
    activity = three_ranks.activity(1)
    activity.begin(5, "höst-" + "x" * 100, 1)
    activity.set(prepare(State.RUNNING, "x" * 500))
    activity.at("/a/" + "b" * 300 + "/net.py:12 in read")
    after = three_ranks.path.read_bytes()
    assert len(after) == len(before) == 4 * LINE_BYTES
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    assert [index for index, (line, other) in enumerate(lines) if line != other] == [2]
    status = three_ranks.ranks()[1]
    assert status.host_name.startswith("h?st-x")
    assert status.doing == "x" * 80
    assert status.at.startswith("...bb")
    assert status.at.endswith("b/net.py:12 in read")


def test_a_line_that_is_being_written_can_be_read(three_ranks: StatusFile) -> None:
    head, mark, tail = three_ranks.path.read_bytes().rpartition(b"running")
    three_ranks.path.write_bytes(head + b"rainnng" + tail)
    assert mark
    assert three_ranks.ranks()[1].state is State.RUNNING


def test_the_first_folder_that_can_be_written_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    made = StatusFile.create([file, Path("/proc"), tmp_path / "new"], "b.txt", 2)
    assert made.path == tmp_path / "new" / "b.txt"
    with pytest.raises(MachineError, match=r"cannot be written: .*file: File exists") as caught:
        StatusFile.create([file], "b.txt", 2)
    assert "--log-dir" in str(caught.value.remedy)
    with pytest.raises(MachineError, match="this rank cannot write to it: No such file"):
        StatusFile.attach(tmp_path / "none.txt")


_KILLED = """
import sys
from pathlib import Path
from typing import IO
from sambasim.runtime.watch.status_file import StatusFile
for name in sys.argv[2:]:
    StatusFile.create([Path(sys.argv[1])], name, 1).activity(0).begin(0, "a", 1)
"""


def test_a_new_file_takes_the_place_of_those_of_runs_that_were_killed(tmp_path: Path) -> None:
    assert name_of("net", "node7.cluster", 12) == "net-ranks-node7.cluster-12.txt"
    assert name_of("", "a/b", 12) == "ranks-a_b-12.txt"
    killed, others = name_of("net", "a", 71), [name_of("other", "a", 72), name_of("net", "b", 73)]
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), killed, *others], timeout=60, check=True)
    assert (tmp_path / killed).exists()
    alive = StatusFile.create([tmp_path], name_of("net", "a", 74), 1)
    assert not (tmp_path / killed).exists()
    created = StatusFile.create([tmp_path], name_of("net", "a", 75), 1)
    assert alive.path.exists()
    assert created.path.exists()
    assert all((tmp_path / name).exists() for name in others), "of another PEF, and of another host"


def test_a_run_that_starts_at_the_same_time_takes_no_file_that_is_not_locked_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = fcntl.flock, list[StatusFile]()

    def late(file: IO[bytes], how: int) -> None:
        if not others and how == fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", lock)
            others.append(StatusFile.create([tmp_path], name_of("net", "host", 2), 1))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    file = StatusFile.create([tmp_path], name_of("net", "host", 1), 1)
    assert (file.path.exists(), others[0].path.exists()) == (True, True)
    assert sorted(tmp_path.iterdir()) == [file.path, others[0].path]
