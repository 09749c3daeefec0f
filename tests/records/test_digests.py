"""The digests of a run, read back: whole lines, and errors that name the file and the line."""

from pathlib import Path

import pytest

from sambasim.errors import ArtifactError, OptionError
from sambasim.records.digests import RUN_FILE, ValueDigest, is_recording, read_recording, replica_file
from tests.support.recordings import a_run, a_step, write_recording

NAN = ValueDigest("gradient", "net__w__grad", 0, 1, "ab" * 8, None, 3)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    steps = [a_step(1, loss=None), a_step(2, more=[NAN])]
    recording = read_recording(write_recording(tmp_path / "a", {0: steps, 11: steps}))
    assert recording.run == a_run()
    assert recording.replicas == (0, 11)
    assert list(recording.steps(11)) == steps


def test_a_last_line_without_an_end_is_left_out(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "a", {0: [a_step(1), a_step(2)]})
    file = folder / replica_file(0)
    file.write_text(file.read_text(encoding="utf-8")[:-10], encoding="utf-8")
    assert [step.step for step in read_recording(folder).steps(0)] == [1]


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "a", {0: [a_step(1), a_step(2)]})
    file = folder / replica_file(0)
    file.write_text(file.read_text(encoding="utf-8").replace('"step":2', '"stop":2'), encoding="utf-8")
    with pytest.raises(ArtifactError, match="is not what sambasim run --record-digests writes: step: Field") as error:
        list(read_recording(folder).steps(0))
    assert error.value.where == f"{file}:2"


def test_a_folder_without_replicas_is_told(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "a", {})
    with pytest.raises(ArtifactError, match="has no file of a replica"):
        read_recording(folder)


def test_another_run_file_is_told(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "a", {0: [a_step(1)]})
    (folder / RUN_FILE).write_text('{"kind": "other"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"run.json is not what sambasim run --record-digests writes: kind"):
        read_recording(folder)


def test_a_folder_of_something_else_is_no_recording(tmp_path: Path) -> None:
    assert not is_recording(tmp_path)
    with pytest.raises(OptionError, match=r"run.json cannot be read: No such file"):
        read_recording(tmp_path)
