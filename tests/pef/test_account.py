"""The record of what this account compiled: private, bounded, and never in the way."""

import os
import stat
from pathlib import Path

import pytest

from sambasim.pef import account
from sambasim.pef.account import is_compiled_here, record_compiled


def digest(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "sambasim" / "compiled-pefs"


def test_a_recorded_digest_is_known_and_no_other(folder: Path) -> None:
    assert not is_compiled_here(digest(1))
    assert record_compiled(digest(1)) is None
    assert is_compiled_here(digest(1))
    for other in (digest(2), digest(1)[:-1], "", "..", "."):
        assert not is_compiled_here(other)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_oldest_are_dropped_past_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "MOST_RECORDS", 9)
    for number in range(9):
        record_compiled(digest(number))
        for path in folder.iterdir():  # the clock of a file system may stand still for some milliseconds
            os.utime(path, (int(path.name, 16), int(path.name, 16)))
    record_compiled(digest(9))
    assert [is_compiled_here(digest(number)) for number in range(10)] == [False] * 5 + [True] * 5


def test_a_home_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert record_compiled(digest(1))
    assert not is_compiled_here(digest(1))


def test_what_others_can_write_proves_nothing(folder: Path, tmp_path: Path) -> None:
    record_compiled(digest(1))
    folder.chmod(0o722)
    assert not is_compiled_here(digest(1))
    folder.chmod(0o700)
    assert is_compiled_here(digest(1))
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert not is_compiled_here(digest(1))


def test_the_default_folder_is_where_the_convention_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    record_compiled(digest(1))
    assert (tmp_path / ".local" / "state" / "sambasim" / "compiled-pefs" / digest(1)).exists()
