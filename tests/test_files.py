"""Files appear whole or not at all, nobody else decides where they are written, and memory that is short is told."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from sambasim.commands.results import compare
from sambasim.errors import MachineError, OptionError, WeightsError
from sambasim.files import replacing, write_whole
from sambasim.records.digests import RUN_FILE, read_recording
from sambasim.runtime.checkpoint.folder import LOCK_FILE, claim
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.run_observer import LineFile
from sambasim.runtime.values.memory import read_tensors, write_tensors

OTHER = 12345  # an account

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another account")


def hidden_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def killed_while_writing(path: Path, number: int) -> None:
    """A process that is killed by signal `number` while it writes `path`."""
    if (child := os.fork()) == 0:
        try:
            with replacing(path) as hidden:
                hidden.write_text("half", encoding="utf-8")
                os.kill(os.getpid(), number)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == number


def test_what_a_killed_writer_left_is_removed_by_the_next_of_that_name(tmp_path: Path) -> None:
    path, other = tmp_path / "w.safetensors", tmp_path / "w"
    for number in (signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM):
        killed_while_writing(path, number)
    killed_while_writing(other, signal.SIGKILL)
    assert len(hidden_in(tmp_path)) == 2, "each writer removes what the one before it left"
    write_tensors(path, {"w": torch.ones(2)}, "the weights", "")
    (left,) = hidden_in(tmp_path)
    assert left.name.startswith(".w.")
    assert not left.name.startswith(".w.safetensors")
    write_whole(other, "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "w.safetensors"]


def test_two_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json"
    with replacing(path) as first:
        first.write_text("first", encoding="utf-8")
        with replacing(path) as second:
            second.write_text("second", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "second"
    assert path.read_text(encoding="utf-8") == "first"
    assert list(path.parent.iterdir()) == [path]


def test_a_name_may_have_all_bytes_that_file_systems_allow(tmp_path: Path) -> None:
    write_whole(tmp_path / ("n" * 255), "whole")
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ["whole"]


def test_nothing_is_left_of_a_writer_that_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with replacing(tmp_path / "a" / "b" / "t.json") as hidden:
            assert hidden.parent.stat().st_mode & 0o777 == 0o700
            hidden.write_text(str(1 / 0), encoding="utf-8")

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())


@needs_root
def test_a_leftover_of_another_host_or_account_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    killed_while_writing(path, signal.SIGKILL)
    (left,) = hidden_in(tmp_path)
    monkeypatch.setattr("sambasim.files._host", lambda: "01234567")
    write_whole(path, "whole")
    assert left.exists()
    monkeypatch.undo()
    os.chown(left, OTHER, -1)
    write_whole(path, "whole")
    assert left.exists()


@needs_root
def test_a_link_of_another_account_in_a_folder_that_others_can_write_is_not_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "shared" / "t.json"
    victim.write_text("mine", encoding="utf-8")
    link.parent.mkdir()
    link.symlink_to(victim)
    link.parent.chmod(0o777)
    os.chown(link, OTHER, -1, follow_symlinks=False)
    for write in (write_whole, lambda path, text: LineFile(path, "it", "--flag", print).write(text)):
        with pytest.raises((OSError, OptionError), match="a link of another account"):
            write(link, "theirs")
    assert victim.read_text(encoding="utf-8") == "mine"
    link.parent.chmod(0o755)
    write_whole(link, "theirs")
    assert victim.read_text(encoding="utf-8") == "theirs"


def test_what_is_no_regular_file_stays_and_is_written_to(tmp_path: Path) -> None:
    pipe, null = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    null.symlink_to("/dev/null")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, null):
        write_tensors(path, {"w": torch.zeros(1)}, "it", "--flag")
    assert load(os.read(reader, 1000)).keys() == {"w"}
    os.close(reader)
    assert sorted(tmp_path.iterdir()) == [null, pipe]
    assert pipe.is_fifo()
    assert null.is_symlink()


def test_no_reader_and_no_lock_waits_for_the_other_end_of_a_pipe(tmp_path: Path) -> None:
    for name in (LOCK_FILE, RUN_FILE, "w.safetensors"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(MachineError, match="No such device"):
        claim(tmp_path, single_rank("here"))
    with pytest.raises(OptionError, match="not a regular file"):
        read_recording(tmp_path)
    with pytest.raises(WeightsError, match="not a regular file"):
        read_tensors(tmp_path / "w.safetensors", "another file")


def test_a_file_that_memory_cannot_hold_is_told_with_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(1)}, file)
    header = file.read_bytes()[8:-4].replace(b"[1]", b"[%d]" % (1 << 30)).replace(b"[0,4]", b"[0,%d]" % (4 << 30))
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + (4 << 30))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (1 << 30), limits[1]))
    try:
        with pytest.raises(MachineError, match=r"not enough memory for .*w\.safetensors \(4\.0 GiB\)"):
            compare(str(file), str(file), None, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    one = b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{%s,%s}" % (one, one.replace(b"F32", b"I32"))
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match="w is given twice in one table"):
        read_tensors(file, "")
