"""Record files with a line dropped, doubled, swapped or cut: `compare` never says that they are equal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from sambasim.commands.results import compare
from sambasim.errors import ArtifactError
from sambasim.records.digests import replica_file
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, Line, json_line
from tests.faults.command import sambasim
from tests.report.test_page import a_run as a_run_with_metrics
from tests.support.recordings import a_step, write_recording

STEPS = 4


def digests(folder: Path) -> Sequence[Path]:
    steps = [a_step(number) for number in range(1, STEPS + 1)]
    recording = write_recording(folder / "run", dict.fromkeys((0, 1), steps))
    return [recording / replica_file(replica) for replica in (0, 1)]


def metrics(folder: Path) -> Sequence[Path]:
    folder.mkdir(parents=True)
    run = a_run_with_metrics()
    assert run.summary is not None
    middle = EvaluationRecord(step=4, epoch=1, samples=36, loss=0.7, accuracy=0.5, evaluation_s=0.1)
    saved = CheckpointRecord(step=6, epoch=1, path="ck", size_bytes=8, checkpoint_s=0.1)
    records: list[Line] = [*run.steps[:4], middle, *run.steps[4:6], saved, *run.steps[6:], *run.evaluations]
    records.append(run.summary.model_copy(update={"lines": len(records)}))
    file = folder / "run.jsonl"
    file.write_text("".join(map(json_line, records)), encoding="utf-8")
    return [file]


def mutations(text: str) -> Iterator[tuple[str, str]]:
    """Each with its name."""
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        before, after = lines[:at], lines[at + 1 :]
        yield f"line {at} dropped", "".join([*before, *after])
        yield f"line {at} doubled", "".join([*before, line, line, *after])
        yield f"line {at} again at the end", text + line
        yield f"line {at} cut", "".join([*before, line[: len(line) // 2] + "\n", *after])
        yield f"cut in line {at}", "".join([*before, line[: len(line) // 2]])
        yield f"cut after line {at}", "".join(before)
        if after:
            yield f"lines {at} and {at + 1} swapped", "".join([*before, after[0], line, *after[1:]])
    yield "reversed", "".join(reversed(lines))


@pytest.mark.parametrize("write", [digests, metrics])
def test_files_with_other_lines_than_were_written_are_never_equal(
    write: Callable[[Path], Sequence[Path]], tmp_path: Path
) -> None:
    ours, theirs = (write(tmp_path / name) for name in "ab")
    a, b = (str(files[0] if len(files) == 1 else files[0].parent) for files in (ours, theirs))
    assert compare(a, b, None, tmp_path).equal
    wrong, texts = [], [file.read_text(encoding="utf-8") for file in ours]
    for at, text in enumerate(texts):
        for name, changed in mutations(text):
            for which, files in (("one", [theirs]), ("both", [ours, theirs])):
                for side in files:
                    side[at].write_text(changed, encoding="utf-8")
                with suppress(ArtifactError):
                    if compare(a, b, None, tmp_path).equal:
                        wrong.append(f"{name} in {which}")
                for side in files:
                    side[at].write_text(text, encoding="utf-8")
    assert not wrong


def test_a_file_of_a_replica_that_both_lack_is_missed(tmp_path: Path) -> None:
    for name in "ab":
        _, second = digests(tmp_path / name)
        second.unlink()
    found = compare(str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"), None, tmp_path)
    assert not found.equal
    assert found.notes == ["A has no file of replica 1", "B has no file of replica 1"]


@pytest.mark.parametrize("write", [digests, metrics])
def test_steps_that_are_asked_must_be_in_both(write: Callable[[Path], Sequence[Path]], tmp_path: Path) -> None:
    files = [write(tmp_path / name)[0] for name in "ab"]
    a, b = (str(file if write is metrics else file.parent) for file in files)
    for asked in ("1-2", "3", "2-4", "2-"):
        assert compare(a, b, asked, tmp_path).equal
    for file in files:  # of runs that were killed
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[:3]), encoding="utf-8")
    for asked, equal in (("1-2", True), ("2", True), ("2-4", False), ("2-", False), ("4", False)):
        assert compare(a, b, asked, tmp_path).equal == equal


def test_runs_that_were_resumed_are_equal_from_there_on(tmp_path: Path) -> None:
    files = [metrics(tmp_path / name)[0] for name in "ab"]
    a, b = map(str, files)
    lines = files[1].read_text(encoding="utf-8").splitlines(keepends=True)
    resumed = lines[-1].replace('"resumed_after_step":null', '"resumed_after_step":3')
    resumed = resumed.replace(f'"lines":{len(lines) - 1}', f'"lines":{len(lines) - 4}')
    files[1].write_text("".join([*lines[3:-1], resumed]), encoding="utf-8")
    found = compare(a, b, None, tmp_path)
    assert (found.equal, found.verdict) == (False, "equal: losses of 5 steps, 2 evaluations, as far as both go")
    assert found.notes[0] == "B begins at step 4"
    assert compare(a, b, "4-", tmp_path).equal
    assert not compare(a, b, "3-", tmp_path).equal
    assert compare(b, b, None, tmp_path).equal
    files[1].write_text("".join([*lines[5:-1], resumed]), encoding="utf-8")
    with pytest.raises(ArtifactError, match="a line is of step 5, where one of step 4 is due"):
        compare(a, b, None, tmp_path)


@pytest.mark.parametrize("write", [digests, metrics])
def test_a_record_that_lacks_a_line_is_no_equal_one(write: Callable[[Path], Sequence[Path]], tmp_path: Path) -> None:
    (path, *others), whole = write(tmp_path / "a"), write(tmp_path / "b")[0]
    a, b = (str(file.parent if others else file) for file in (path, whole))
    assert sambasim(["compare", a, b], tmp_path).returncode == 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[2:]]), encoding="utf-8")
    found = sambasim(["compare", a, b], tmp_path)
    assert (found.returncode, "error[incomplete]" in found.stderr) == (1, True)
