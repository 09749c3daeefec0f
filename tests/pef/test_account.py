"""The note of what this account has compiled: private, bounded, and never in the way."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sambasim.pef import account
from sambasim.pef.account import MOST_DIGESTS, is_compiled_here, note_compiled


def digest(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "sambasim" / "compiled"


def test_a_digest_that_was_noted_is_known_and_no_other(state: Path) -> None:
    assert not is_compiled_here(digest(1))
    assert note_compiled(digest(1)) is None
    assert is_compiled_here(digest(1))
    assert not is_compiled_here(digest(2))
    assert not is_compiled_here(digest(1)[:-1])
    assert not is_compiled_here("")


def test_the_file_and_its_folder_are_the_accounts_alone(state: Path) -> None:
    note_compiled(digest(1))
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.parent.stat().st_mode) == 0o700


def test_several_at_once_lose_no_line(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(note_compiled, map(digest, range(200)))) == {None}
    assert all(is_compiled_here(digest(number)) for number in range(200))


def test_the_oldest_are_dropped_past_a_bound(state: Path) -> None:
    note_compiled(digest(0))
    with state.open("a") as file:
        file.writelines(f"{digest(number)}\n" for number in range(1, MOST_DIGESTS + 1))
    note_compiled(digest(MOST_DIGESTS + 1))
    assert not is_compiled_here(digest(0))
    assert is_compiled_here(digest(MOST_DIGESTS + 1))
    assert len(state.read_text().splitlines()) == MOST_DIGESTS // 2
    assert [path.name for path in state.parent.iterdir()] == ["compiled"]


def test_a_home_that_cannot_be_written_is_told_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert note_compiled(digest(1))
    assert not is_compiled_here(digest(1))


def test_a_file_that_others_can_write_says_nothing(state: Path) -> None:
    note_compiled(digest(1))
    state.chmod(0o622)
    assert not is_compiled_here(digest(1))


def test_a_link_is_not_followed(state: Path, tmp_path: Path) -> None:
    note_compiled(digest(1))
    state.rename(tmp_path / "elsewhere")
    state.symlink_to(tmp_path / "elsewhere")
    assert not is_compiled_here(digest(1))
    assert note_compiled(digest(2))


def test_the_state_folder_is_where_the_convention_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    note_compiled(digest(1))
    assert (tmp_path / ".local" / "state" / "sambasim" / "compiled").read_text() == f"{digest(1)}\n"
    assert account.MOST_DIGESTS == 10_000
