"""Which checkpoint a run goes on from, and what it says of the others."""

import errno
from pathlib import Path

import pytest

from sambasim.errors import CheckpointError, MachineError, OptionError
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.choose import AUTO, NEWEST, check_last, check_new, choose
from sambasim.runtime.checkpoint.claim import LOCK_FILE, claim
from sambasim.runtime.single_rank import single_rank
from tests.runtime.checkpoint.samples import SHARD, change_bytes, change_fields, write_sample

ALONE = single_rank("here")


def damage(path: Path) -> None:
    change_bytes(path, SHARD, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Checkpoints after steps 10, 20 and 30."""
    return [write_sample(tmp_path, step) for step in (10, 20, 30)]


def test_the_newest_is_taken(three: list[Path], tmp_path: Path) -> None:
    assert choose(NEWEST, tmp_path, ALONE).checkpoint.path == three[2]
    assert choose(AUTO, tmp_path, ALONE).checkpoint.path == three[2]


def test_one_is_taken_by_its_path_or_by_that_of_its_folder(three: list[Path], tmp_path: Path) -> None:
    assert choose(str(three[0]), None, ALONE).checkpoint.path == three[0]
    assert choose(str(tmp_path), None, ALONE).checkpoint.path == three[2]


def test_a_word_that_is_nearly_one_is_guessed(tmp_path: Path) -> None:
    for word, guess in (("if_any", "if-any"), ("Auto", "auto"), ("newst", "newest")):
        with pytest.raises(OptionError) as error:
            choose(word, tmp_path, ALONE)
        assert error.value.remedy == f"did you mean --resume {guess}?"


def test_a_damaged_newest_is_refused(three: list[Path], tmp_path: Path) -> None:
    damage(three[2])
    with pytest.raises(CheckpointError, match="step-0000000030 breaks rule 14"):
        choose(NEWEST, tmp_path, ALONE)
    assert three[2].exists()


def test_auto_takes_the_one_before_it_and_puts_the_damaged_one_aside(three: list[Path], tmp_path: Path) -> None:
    damage(three[2])
    chosen = choose(AUTO, tmp_path, ALONE)
    assert chosen.checkpoint.path == three[1]
    (notice,) = chosen.notices
    assert notice.startswith("step-0000000030 breaks rule 14")
    assert notice.endswith("it is now damaged-step-0000000030")
    assert [path.name for path in folder.checkpoints_in(tmp_path)] == ["step-0000000020", "step-0000000010"]
    assert (tmp_path / "damaged-step-0000000030" / SHARD).exists()


def test_auto_never_begins_anew_in_silence(three: list[Path], tmp_path: Path) -> None:
    for path in three:
        damage(path)
    with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints in .* is whole"):
        choose(AUTO, tmp_path, ALONE)
    assert len(folder.checkpoints_in(tmp_path)) == 3, "nothing is put aside where nothing is taken"


@pytest.mark.parametrize("resume", [AUTO, NEWEST])
def test_an_empty_folder_is_refused(resume: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no checkpoint"):
        choose(resume, tmp_path, ALONE)
    with pytest.raises(OptionError, match="there is no checkpoint"):
        choose(resume, tmp_path / "nowhere", ALONE)


def test_what_died_while_it_was_written_is_no_checkpoint(three: list[Path], tmp_path: Path) -> None:
    three[2].rename(folder.partial_of(three[2]))
    assert choose(NEWEST, tmp_path, ALONE).checkpoint.path == three[1]
    again = write_sample(tmp_path, 30)
    assert not folder.partial_of(again).exists()


def test_a_new_run_does_not_write_among_those_of_another(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the newest step-0000000030"):
        check_new(tmp_path)
    check_new(tmp_path / "another")


def test_two_courses_of_a_run_do_not_share_a_folder(three: list[Path], tmp_path: Path) -> None:
    first, last = (choose(str(path), None, ALONE).checkpoint for path in (three[0], three[2]))
    check_last(last, tmp_path)
    check_last(first, tmp_path / "another")
    with pytest.raises(OptionError, match="holds 2 later checkpoints than that of step 10"):
        check_last(first, tmp_path)


def test_a_checkpoint_may_have_any_name(three: list[Path], tmp_path: Path) -> None:
    best = three[2].rename(tmp_path / "best")
    chosen = choose(str(best), None, ALONE).checkpoint
    check_last(chosen, tmp_path)
    assert chosen.manifest.position.step == 30


def test_what_cannot_be_read_just_now_is_not_put_aside(three: list[Path], tmp_path: Path) -> None:
    change_fields(three[2], lambda found: found.update(version="1.1", writer="sambasim 9.9"))
    with pytest.raises(CheckpointError, match=r"a checkpoint of format 1\.1"):
        choose(AUTO, tmp_path, ALONE)
    assert three[2].exists()


def test_auto_puts_a_file_aside_that_has_the_name_of_a_checkpoint(three: list[Path], tmp_path: Path) -> None:
    (tmp_path / "step-0000000040").write_text("")
    assert choose(AUTO, tmp_path, ALONE).checkpoint.path == three[2]
    assert (tmp_path / "damaged-step-0000000040").exists()


def test_a_checkpoint_that_was_being_replaced_is_given_back(three: list[Path], tmp_path: Path) -> None:
    three[2].rename(tmp_path / f".{three[2].name}.replaced")
    held = claim(tmp_path, ALONE)
    assert held is not None
    assert choose(NEWEST, tmp_path, ALONE).checkpoint.path == three[2]
    held.let_go()


def test_a_claim_sees_that_its_folder_is_gone(tmp_path: Path) -> None:
    held = claim(tmp_path / "saved", ALONE)
    assert held is not None
    assert held.holds()
    (tmp_path / "saved").rename(tmp_path / "moved")
    assert not held.holds()
    held.let_go()


def test_a_claim_sees_that_its_lock_is_gone(tmp_path: Path) -> None:
    held = claim(tmp_path, ALONE)
    assert held is not None
    (tmp_path / LOCK_FILE).unlink()
    with pytest.raises(MachineError, match=r"is not there any more, or its \.lock is gone"):
        write_sample(tmp_path, held=held)
    held.let_go()


def test_a_lock_that_may_not_be_opened_is_not_said_to_be_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, flags: int, mode: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("sambasim.runtime.checkpoint.claim.os.open", refuse)
    with pytest.raises(MachineError, match=r"no checkpoint can be written into .*: Permission denied") as told:
        claim(tmp_path, ALONE)
    assert told.value.where == str(tmp_path / LOCK_FILE)


def test_one_that_cannot_be_replaced_stays(three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(MachineError, match="Input/output error"):
        write_sample(tmp_path, 30)
    assert choose(NEWEST, tmp_path, ALONE).checkpoint.path == three[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in three]


def test_writing_over_one_replaces_it(three: list[Path], tmp_path: Path) -> None:
    damage(three[2])
    write_sample(tmp_path, 30)
    assert choose(NEWEST, tmp_path, ALONE).checkpoint.path == three[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in three]
