"""What `--pef` finds, and what it says when it finds nothing."""

from pathlib import Path

import pytest

from sambasim.errors import OptionError
from sambasim.pef import locate


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
    assert locate(str(tmp_path / "net.pef")) == tmp_path / "net.pef"


def test_another_output_folder(tmp_path: Path) -> None:
    found = make(tmp_path / "there" / "net" / "net.pef")
    assert locate("net", tmp_path / "there") == found


def test_a_miss_says_everything_it_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("out/net/net.pef"))
    make(Path("out/digits/digits.pef"))
    make(Path("out/digits/other.pef"))
    with pytest.raises(OptionError) as caught:
        locate("nte")
    assert caught.value.what == "there is no PEF 'nte'"
    assert caught.value.where == f"looked for nte (not there), then out/nte/nte.pef (not there), from {tmp_path}"
    assert caught.value.remedy == "one of those in out: digits, net"


def test_a_miss_by_path_looks_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out/net").mkdir(parents=True)
    with pytest.raises(OptionError) as caught:
        locate("out/net")
    assert caught.value.where == f"looked for out/net (a folder), from {tmp_path}"
    assert caught.value.remedy == "compile it first: sambasim compile"


def test_many_pefs_are_not_all_listed(tmp_path: Path) -> None:
    for number in range(8):
        make(tmp_path / f"net{number}" / f"net{number}.pef")
    with pytest.raises(OptionError) as caught:
        locate("net", tmp_path)
    assert str(caught.value.remedy).endswith(": net0, net1, net2, net3, net4 and 3 more")


@pytest.mark.parametrize("pef", ["", ".", "..", ".pef", "../out/net"])
def test_odd_names(pef: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="there is no PEF"):
        locate(pef)


def test_a_checkpoint_is_told_as_what_it_is(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-0000000020"
    checkpoint.mkdir()
    (checkpoint / "checkpoint.json").touch()
    with pytest.raises(OptionError, match=r"is a checkpoint, and no PEF") as caught:
        locate(str(checkpoint))
    assert caught.value.remedy is not None
    assert f"--resume {checkpoint}" in caught.value.remedy
