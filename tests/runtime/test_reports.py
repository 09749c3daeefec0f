"""What a run reports: the metrics file, traces, tensors of recorded digests, and predicted times in the summary."""

import contextlib
import csv
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sambasim.errors import OptionError
from sambasim.hardware.placement import Inventory, inventory_of, place
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import TensorType
from sambasim.records.metrics import LINES, CheckpointRecord, EvaluationRecord, StepRecord, read_run
from sambasim.runtime import prediction
from sambasim.runtime.prediction import predicted, predicted_record
from sambasim.runtime.record import trace as tracing
from sambasim.runtime.record.digests import UNWRITTEN, Seen, seen_of_sections
from sambasim.runtime.record.trace import traced_steps
from sambasim.runtime.run.plan import Plan, Position
from sambasim.runtime.run.run_observer import MetricsFile, RunObservers, Start, metrics_files
from sambasim.runtime.run.tensorboard import TensorBoard
from sambasim.simulation.prediction import backing_of
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program
from tests.support.examples import compiled
from tests.support.runs import run_options, train_alone
from tests.support.summaries import summary
from tests.support.trace_format import read_trace

PLAN = Plan(
    world_size=1, batch_size=4, accumulation_steps=1, samples=16, steps_per_epoch=4, first_ends=4, steps=4, left_out=0
)
START = Start("net", PLAN, "none", 1, "net.py:samples", ())
STEP = StepRecord(step=1, epoch=0, loss=1.5, lr=0.1, step_s=0.01, sync_s=0.0, hidden_sync_s=0.0, samples_per_s=400.0)


def test_a_metrics_file_begins_with_the_first_step_of_its_run(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "deep" / "m.jsonl").started(START)
    assert list(tmp_path.iterdir()) == [], "a run that fails before has none"
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "summary"}\n')
    file = MetricsFile(path)
    assert path.read_text() == '{"kind": "summary"}\n', "a run that is refused touches nothing"
    file.started(START)
    assert path.read_text() == ""
    file.stepped(STEP)
    (line,) = path.read_text().splitlines()
    assert LINES.validate_json(line) == STEP


EVALUATED = EvaluationRecord(step=1, epoch=1, samples=9, loss=0.5, logged={"kl": 2.0}, accuracy=None, evaluation_s=0.1)


def test_a_csv_file_has_steps_and_another_beside_it_evaluations(tmp_path: Path) -> None:
    path, beside = tmp_path / "m.csv", tmp_path / "m.evaluations.csv"
    logged = replace(STEP, logged={"kl, of q": math.nan}, waited_s={"pp": 0.5})
    for done in (0, 1, 1):  # a run, and two that resume after its first step
        file = RunObservers(metrics_files(path, print))
        file.started(replace(START, plan=replace(PLAN, start=Position(done, 0, done))))
        for number in range(done + 1, 4):
            file.stepped(replace(logged, step=number, loss=number / 3))
        if not done:
            file.evaluated(EVALUATED)
        file.saved(CheckpointRecord(step=3, epoch=1, path="here", size_bytes=1, checkpoint_s=0.1))
        file.ended(summary("none"))
        rows = list(csv.DictReader(path.open()))
        assert [(row["step"], float(row["loss"])) for row in rows] == [(str(n), n / 3) for n in (1, 2, 3)]
        assert (rows[0]["logged.kl, of q"], rows[0]["waited_s.pp"], rows[0]["grad_norm"]) == ("nan", "0.5", "")
        assert beside.read_text() == ("step,epoch,samples,loss,logged.kl,accuracy,evaluation_s\n1,1,9,0.5,2.0,,0.1\n")
    told: list[str] = []
    file = RunObservers(metrics_files(path, told.append))
    file.started(replace(START, plan=replace(PLAN, start=Position(1, 0, 1))))
    for number, has in ((2, {}), (3, {"mse": 1.0, "kl, of q": 2.0}), (4, {"mae": 1.0})):
        file.stepped(replace(STEP, step=number, logged=has))
    rows = list(csv.DictReader(path.open()))
    assert [(row["step"], row["logged.kl, of q"]) for row in rows] == [("1", "nan"), ("2", ""), ("3", "2.0"), ("4", "")]
    assert [str(path) in one and "no column for logged.mse, which is left out" in one for one in told] == [True]
    with pytest.raises(OptionError, match=r"m\.csv is a table for other programs(.|\n)*--metrics FILE\.jsonl"):
        read_run(path)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_shows_what_a_run_told_until_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(TensorBoard(tmp_path)) as board:
        board.started(START)
        board.stepped(replace(STEP, logged={"kl": 2.0}, grad_norm=0.25))
        board.evaluated(EVALUATED)
    found = events(tmp_path)
    train = {f"train/{name}" for name in ("epoch", "loss", "logged/kl", "lr", "samples_per_s", "grad_norm")}
    assert set(found.Tags()["scalars"]) == train | {f"evaluation/{name}" for name in ("epoch", "loss", "logged/kl")}
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(1, 1.5)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OptionError, match=r"--tensorboard needs a package(.|\n)*pip install 'sambasim\[train\]'"):
        TensorBoard(tmp_path)


def test_a_file_behind_a_link_is_written_and_not_the_link(tmp_path: Path) -> None:
    """It may be /dev/stdout; and what others may read of a file does not change."""
    target, link = tmp_path / "target", tmp_path / "m.jsonl"
    link.symlink_to(target)
    kept = '{"kind": "step", "step": 1}\n'
    for done, left in ((0, ""), (1, kept)):
        target.write_text(kept + '{"kind": "summary"}\n')
        target.chmod(0o600)
        MetricsFile(link).started(replace(START, plan=replace(PLAN, start=Position(done, 0, done))))
        assert link.is_symlink()
        assert (target.read_text(), target.stat().st_mode & 0o777) == (left, 0o600)


def test_a_file_that_another_run_is_writing_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = MetricsFile(path)
    first.stepped(STEP)
    if (child := os.fork()) == 0:
        with contextlib.suppress(OptionError):
            MetricsFile(path).started(START)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    first.stepped(STEP)
    assert len(path.read_text().splitlines()) == 2


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = MetricsFile(tmp_path / "file" / "m.jsonl")
    file.started(START)
    with pytest.raises(OptionError, match=r"the metrics file cannot be written to .*file/m.jsonl"):
        file.stepped(STEP)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.rename(path.with_name("old")), Path.touch])
def test_a_file_that_is_removed_or_renamed_while_it_is_written_is_told_once(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    path, told = tmp_path / "m.jsonl", list[str]()
    file = MetricsFile(path, told.append)
    for number in range(1, 4):
        file.stepped(replace(STEP, step=number))
        if number == 1:
            change(path)
    there = f"warning: {path} was removed or replaced while it was written, and lacks what follows"
    assert told == ([] if change is Path.touch else [there])


@pytest.mark.parametrize(
    ("asked", "steps", "traced"),
    [
        *((None, 100, [2, 3, 4]), (None, 5, [2, 3, 4]), (None, 4, [1, 2, 3]), (None, 1, [0])),
        *((1, 2, [1]), (1, 100, [2]), (7, 4, [0, 1, 2, 3])),
    ],
)
def test_the_first_steps_are_left_out_of_a_trace_where_there_are_enough(
    asked: int | None, steps: int, traced: list[int]
) -> None:
    assert list(traced_steps(asked, steps)) == traced


def test_a_trace_that_is_full_has_its_steps_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_SPANS", 3)
    pef = compiled("logistic_regression", tmp_path)
    train_alone(pef, run_options(pef, training={"steps": 6}, trace=tmp_path / "trace.json"))
    trace = read_trace((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert len(trace.spans) == 3 + 3
    assert [step.name for step in trace.named("step ")] == ["step 3", "step 4", "step 5"]
    assert trace.facts["spans_left_out"] > 10


def seen(program: Program) -> list[list[Seen]]:
    return [list(section) for section in seen_of_sections(program.step, program)]


def test_gradients_are_seen_in_memory_and_losses_and_buffers_by_their_symbols() -> None:
    forward, backward = seen(sample_program())
    softmax, loss = Seen("value", "log_softmax", 0, "log_softmax"), Seen("loss", "loss", 0, "nll")
    assert forward == [softmax, loss, Seen("value", "n", 0, "n")]
    weight, bias = "logreg__lin_layer__weight__grad", "logreg__lin_layer__bias__grad"
    assert backward == [Seen("gradient", weight, 1, None), Seen("gradient", bias, 1, None)]


def test_results_with_bytes_that_nobody_has_written_are_not_seen() -> None:
    empty = Node("a", "aten.empty_like.default", (Ref("x"),), (), ("a",))
    layer = Node("l", "aten.mkldnn_rnn_layer.default", (Ref("x"),), (), ("y", "h", "c", "notes"))
    after = Node("z", "aten.cat.default", ((Ref("a"), Ref("y"), Ref("notes")),), (), ("z",))
    nodes = (empty, layer, after)
    values = {name: TensorType("float32", (4,)) for node in nodes for name in node.results if name is not None}
    sections = (Section(0, SectionKind.FWD, "s0", 0, 2), Section(1, SectionKind.BCKWD, "s1", 2, 3))
    program = replace(sample_program(), training=Graph("training", ("x",), nodes, (), values, sections))
    assert seen(program)[0] == [Seen("value", "y", 0, "y")]
    assert {name for name in OPERATORS if "empty" in name} == {name for name in UNWRITTEN if "empty" in name}


SN30 = inventory_of({})


def predict(inventory: Inventory, micro_steps: int = 1) -> PredictedStep | str:
    placement = place(2, inventory.device, inventory.tiles, inventory.cluster)
    return predicted(sample_program(), inventory, placement, SyncPath.RDU, micro_steps)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_the_fields_add_up_and_all_say_that_they_are_predicted(micro_steps: int) -> None:
    step = predict(SN30, micro_steps=micro_steps)
    assert isinstance(step, PredictedStep)
    record = predicted_record(step, SN30)
    assert record.predicted_backed_by == backing_of(SN30.device, 2)
    assert all(name.startswith("predicted_") for name in record.model_dump())
    by_kind = record.predicted_by_kind_s
    assert by_kind["FWD"] + by_kind["BCKWD"] == pytest.approx(record.predicted_model_s)
    assert by_kind["OPT"] + by_kind["GRADNORM"] == pytest.approx(record.predicted_update_s)
    assert step.synced.slowest_s > 0
    sync_s = record.predicted_sync_s + record.predicted_hidden_sync_s
    assert by_kind["REDUCE"] + by_kind["GATHER"] + step.synced.slowest_s == pytest.approx(sync_s)
    samples = 2 * micro_steps * sample_program().batch_size
    assert record.predicted_samples_per_s == pytest.approx(samples / record.predicted_step_s)


def test_what_backs_it_names_the_device() -> None:
    assert backing_of(inventory_of({"arch": "sn40"}).device, 2).startswith("no published step of SN40L backs this")
    alone, together = (backing_of(SN30.device, replicas) for replicas in (1, 2))
    assert together.startswith(alone)
    assert together.endswith("no sync of RDUs was ever published"), "of the sync"
    assert "sync" not in alone


def test_a_device_that_is_too_small_is_the_reason() -> None:
    device = SN30.device.model_copy(update={"ddr_capacity_bytes": 1000})
    assert str(predict(replace(SN30, device=device))).startswith("one replica needs ")


def test_a_mistake_of_ours_does_not_lose_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "price_ranks", Mock(side_effect=KeyError("x")))
    assert predict(SN30) == "this is a mistake of sambasim's own, please report it: KeyError: 'x'"
