"""What `--pef` finds, and the record of what this account compiled."""

import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from sambasim.errors import OptionError
from sambasim.pef import check, files, locate, read, write
from sambasim.pef.files import is_compiled_here, record_compiled
from tests.pef.samples import sample_document, sample_weights


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = make(Path("out/net/net.pef"))
    assert locate("net") == locate("net.pef") == named
    here = make(Path("net.pef"))
    assert locate("net.pef") == here
    assert locate("net") == named
    there = make(tmp_path / "there" / "net" / "net.pef")
    assert locate("net", tmp_path / "there") == there


def test_an_unknown_name_lists_the_places_and_the_pefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("out/net/net.pef"))
    make(Path("out/digits/digits.pef"))
    make(Path("out/digits/other.pef"))
    with pytest.raises(OptionError) as caught:
        locate("nte")
    assert caught.value.what == "there is no PEF 'nte'"
    assert caught.value.where == f"searched nte (not there), then out/nte/nte.pef (not there), from {tmp_path}"
    assert caught.value.remedy == "one of those in out: digits, net"
    with pytest.raises(OptionError) as caught:
        locate("out/net", Path("none"))
    assert caught.value.where == f"searched out/net (a folder), from {tmp_path}"
    assert caught.value.remedy == "compile it first: sambasim compile"
    for pef in ("", ".", "..", ".pef", "../out/net"):
        with pytest.raises(OptionError, match="there is no PEF"):
            locate(pef)


def test_a_checkpoint_is_not_a_pef(tmp_path: Path) -> None:
    make(tmp_path / "step-20" / "checkpoint.json")
    with pytest.raises(OptionError, match=r"is a checkpoint, and no PEF") as caught:
        locate(str(tmp_path / "step-20"))
    assert f"--resume {tmp_path}/step-20" in str(caught.value.remedy)


ONE, TWO = "1" * 64, "2" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "sambasim" / "compiled-pefs"


def test_a_recorded_digest_is_known_and_no_other(folder: Path) -> None:
    assert not is_compiled_here(ONE)
    assert record_compiled(ONE) == []
    assert is_compiled_here(ONE)
    for other in (TWO, ONE[:-1], "", "..", "."):
        assert not is_compiled_here(other)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_home_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(make(tmp_path / "file")))
    assert record_compiled(ONE)
    assert not is_compiled_here(ONE)


def test_what_others_can_write_proves_nothing(folder: Path, tmp_path: Path) -> None:
    record_compiled(ONE)
    folder.chmod(0o722)
    assert not is_compiled_here(ONE)
    folder.chmod(0o700)
    assert is_compiled_here(ONE)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert not is_compiled_here(ONE)


@pytest.mark.usefixtures("folder")
def test_what_this_account_compiled_is_not_verified_again_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = write(tmp_path / "own.pef", sample_document(), sample_weights()).digest
    monkeypatch.setattr(files, "verify", verify := Mock())
    files._parsed.cache_clear()  # a test before this one may have read the same document
    for _ in range(2):
        read(tmp_path / "own.pef")
        assert verify.call_count == 1
        record_compiled(digest)
    check(tmp_path / "own.pef")
    assert verify.call_count == 2
