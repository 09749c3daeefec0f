"""What a run reports: the metrics file, the tensors of recorded digests, and the predicted times in the summary."""

from dataclasses import replace
from pathlib import Path

import pytest

from sambasim.errors import MachineError, OptionError
from sambasim.hardware.placement import Inventory, inventory_of, place
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import TensorType
from sambasim.records.metrics import StepRecord
from sambasim.runtime import outcome
from sambasim.runtime.outcome import predicted, predicted_record
from sambasim.runtime.record.digests import UNWRITTEN, Seen, seen_of_sections
from sambasim.runtime.run.plan import Plan, Position
from sambasim.runtime.run.run_observer import MetricsFile, Start, Step
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program

PLAN = Plan(
    world_size=1, batch_size=4, accumulation_steps=1, samples=16, steps_per_epoch=4, first_ends=4, steps=4, left_out=0
)
START = Start("net", PLAN, "none", 1, "net.py:samples", ())
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
    (line,) = path.read_text().splitlines()
    assert StepRecord.model_validate_json(line) == StepRecord(**STEP._asdict())


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
        assert target.read_text() == left
        assert target.stat().st_mode & 0o777 == 0o600


def test_a_step_has_every_field_of_its_record() -> None:
    assert set(Step._fields) == set(StepRecord.model_fields) - {"kind"}


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


VECTOR = TensorType("float32", (4,))


def program_of(*nodes: Node, stops: tuple[int, ...]) -> Program:
    """The sample with another training step: a section up to each of `stops`, the last one backward."""
    program = sample_program()
    starts = (0, *stops)
    sections = tuple(
        Section(number, SectionKind.BCKWD if stop == stops[-1] else SectionKind.FWD, f"s{number}", start, stop)
        for number, (start, stop) in enumerate(zip(starts, stops, strict=False))
    )
    values = {name: VECTOR for node in nodes for name in node.results if name is not None}
    return replace(program, training=Graph("training", ("x",), nodes, (), values, sections))


def relu(name: str, of: str) -> Node:
    return Node(name, "aten.relu.default", (Ref(of),), (), (name,))


def seen(program: Program) -> list[list[Seen]]:
    assert program.training is not None
    return [list(section) for section in seen_of_sections(program.training, program)]


def test_gradients_are_seen_in_memory_and_losses_and_buffers_by_their_symbols() -> None:
    program = sample_program()
    assert program.training is not None
    forward, backward = seen(program)
    assert forward == [
        Seen("value", "log_softmax", 0, "log_softmax"),
        Seen("loss", "loss", 0, "nll"),
        Seen("value", "n", 0, "n"),
    ]
    weight, bias = "logreg__lin_layer__weight__grad", "logreg__lin_layer__bias__grad"
    assert backward == [Seen("gradient", weight, 1, None), Seen("gradient", bias, 1, None)]


def test_results_with_bytes_that_nobody_has_written_are_not_seen() -> None:
    empty = Node("a", "aten.empty_like.default", (Ref("x"),), (), ("a",))
    layer = Node("l", "aten.mkldnn_rnn_layer.default", (Ref("x"),), (), ("y", "h", "c", "notes"))
    after = Node("z", "aten.cat.default", ((Ref("a"), Ref("y"), Ref("notes")),), (), ("z",))
    assert seen(program_of(empty, layer, after, stops=(2, 3)))[0] == [Seen("value", "y", 0, "y")]


def test_every_operator_that_makes_empty_tensors_is_known() -> None:
    """Those that have `empty` in their names."""
    named = {name for name in OPERATORS if "empty" in name}
    assert named == {name for name in UNWRITTEN if "empty" in name}


SN30 = inventory_of({})


def predict(inventory: Inventory, replicas: int = 2, micro_steps: int = 1) -> PredictedStep | str:
    placement = place(replicas, inventory.device, inventory.tiles, inventory.cluster)
    return predicted(sample_program(), inventory, placement, SyncPath.RDU, micro_steps)


def step_of(inventory: Inventory, replicas: int = 2, micro_steps: int = 1) -> PredictedStep:
    step = predict(inventory, replicas, micro_steps)
    assert isinstance(step, PredictedStep)
    return step


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_the_fields_add_up_and_all_say_that_they_are_predicted(micro_steps: int) -> None:
    step = step_of(SN30, micro_steps=micro_steps)
    record = predicted_record(step, SN30)
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
    sn40 = inventory_of({"arch": "sn40"})
    of_sn40 = predicted_record(step_of(sn40), sn40).predicted_backed_by
    assert of_sn40.startswith("no published step of SN40L backs this")
    alone, together = (predicted_record(step_of(SN30, replicas), SN30).predicted_backed_by for replicas in (1, 2))
    assert together.startswith(alone)
    assert together.endswith("no sync of RDUs was ever published"), "of the sync"
    assert "sync" not in alone


def test_a_device_that_is_too_small_is_the_reason() -> None:
    device = SN30.device.model_copy(update={"ddr_capacity_bytes": 1000})
    assert str(predict(replace(SN30, device=device))).startswith("one replica needs ")


def test_a_mistake_of_ours_does_not_lose_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(outcome, "predict_step", broken)
    assert predict(SN30) == "this is a mistake of sambasim's own, please report it: KeyError: 'x'"
