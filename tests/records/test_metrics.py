"""Reading what a run left behind."""

import math
from pathlib import Path

import pytest

from sambasim.errors import ArtifactError, OptionError
from sambasim.records.metrics import CheckpointRecord, read_run
from tests.report.test_page import a_run


def written(folder: Path, text: str) -> Path:
    path = folder / "run.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def lines() -> list[str]:
    run = a_run()
    assert run.summary is not None
    return [record.model_dump_json() + "\n" for record in (*run.steps, *run.evaluations, run.summary)]


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    assert read_run(written(tmp_path, "".join(lines()))) == a_run()


def test_checkpoints_among_the_records_are_no_fault(tmp_path: Path) -> None:
    saved = CheckpointRecord(step=1, epoch=1, path="saved/step-0000000001", size_bytes=9, checkpoint_s=0.1)
    first, *others = lines()
    assert read_run(written(tmp_path, "".join([first, saved.model_dump_json() + "\n", *others]))) == a_run()


def test_a_run_that_was_stopped_in_a_line(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, "".join(lines())[:-20]))
    assert run.summary is None
    assert run.steps == a_run().steps


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    record = a_run().steps[0].model_copy(update={"loss": math.nan, "grad_norm": math.inf})
    (step,) = read_run(written(tmp_path, record.model_dump_json() + "\n")).steps
    assert math.isnan(step.loss)
    assert step.grad_norm is None


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"kind": "song"}', '{"kind": "step", "step": 1}', '{"kind": []}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, lines()[0] + line + "\n")
    with pytest.raises(ArtifactError, match="a line is not what sambasim run --metrics writes") as caught:
        read_run(path)
    assert caught.value.where == f"{path}:2"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        read_run(tmp_path / "run.jsonl")
    with pytest.raises(ArtifactError, match="has no records"):
        read_run(written(tmp_path, ""))
