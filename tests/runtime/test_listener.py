"""The metrics file: there from the first record on, and complete only after a run that went well."""

from dataclasses import replace
from pathlib import Path

import pytest

from sambasim.errors import MachineError, OptionError
from sambasim.records.metrics import StepRecord
from sambasim.runtime.plan import Plan, Position
from sambasim.runtime.run_observer import MetricsFile, Start, Step

PLAN = Plan(world_size=1, batch_size=4, accumulation_steps=1, samples=16, steps_per_epoch=4, steps=4, left_out=0)
START = Start("net", PLAN, "none", 1, "net.py:samples", (), 0.1)
STEP = Step(step=1, epoch=0, loss=1.5, lr=0.1, step_s=0.01, sync_s=0.0, hidden_sync_s=0.0, samples_per_s=400.0)


def test_a_run_that_fails_before_its_first_step_leaves_no_file(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "deep" / "m.jsonl").started(START)
    assert list(tmp_path.iterdir()) == []


def test_the_summary_of_an_earlier_run_does_not_outlive_the_start_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "summary"}\n')
    file = MetricsFile(path)
    assert path.read_text() == '{"kind": "summary"}\n', "a run that is refused touches nothing"
    file.started(START)
    assert path.read_text() == ""
    file.stepped(STEP)
    assert [StepRecord.model_validate_json(line) for line in path.read_text().splitlines()] == [
        StepRecord(**STEP._asdict())
    ]


def test_a_file_behind_a_link_is_written_and_not_the_link(tmp_path: Path) -> None:
    """It may be /dev/stdout; and what others may read of a file does not change."""
    target, link = tmp_path / "target", tmp_path / "m.jsonl"
    link.symlink_to(target)
    kept = '{"kind": "step", "step": 1}\n'
    for begun, left in ((0, ""), (1, kept)):
        target.write_text(kept + '{"kind": "summary"}\n')
        target.chmod(0o600)
        MetricsFile(link).started(replace(START, plan=replace(PLAN, start=Position(begun, 0, begun))))
        assert link.is_symlink()
        assert target.read_text() == left
        assert target.stat().st_mode & 0o777 == 0o600


def test_a_step_has_every_field_of_its_record() -> None:
    assert set(Step._fields) == set(StepRecord.model_fields) - {"kind"}


def test_folders_are_made(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "deep" / "er" / "m.jsonl")
    file.started(START)
    file.stepped(STEP)
    assert (tmp_path / "deep" / "er" / "m.jsonl").read_text().startswith('{"kind":"step"')


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = MetricsFile(tmp_path / "file" / "m.jsonl")
    file.started(START)
    with pytest.raises(OptionError, match=r"the metrics file cannot be written to .*file/m.jsonl"):
        file.stepped(STEP)
    full = MetricsFile(Path("/dev/full"))
    full.started(START)
    with pytest.raises(MachineError, match=r"/dev/full cannot be written any more: No space left on device"):
        full.stepped(STEP)
