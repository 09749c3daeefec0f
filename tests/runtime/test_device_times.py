"""What is predicted beside a run; and a prediction that fails, which must not cost the run its summary."""

from dataclasses import replace

import pytest

from sambasim.hardware.placement import Inventory, inventory_of, place
from sambasim.records.metrics import PredictedRecord
from sambasim.runtime import outcome
from sambasim.runtime.outcome import predicted, predicted_record
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program

SN30 = inventory_of({})


def predict(inventory: Inventory, replicas: int = 2, micro_steps: int = 1) -> tuple[PredictedRecord | None, str | None]:
    placement = place(replicas, inventory.device, inventory.tiles, inventory.cluster)
    step = predicted(sample_program(), inventory, placement, SyncPath.RDU, micro_steps)
    return (None, step) if isinstance(step, str) else (predicted_record(step, inventory), None)


def test_the_fields_add_up_and_all_say_that_they_are_predicted() -> None:
    for micro_steps in (1, 3):
        record, reason = predict(SN30, micro_steps=micro_steps)
        assert reason is None
        assert record is not None
        assert all(name.startswith("predicted_") for name in record.model_dump())
        by_kind = record.predicted_by_kind_s
        assert by_kind["FWD"] + by_kind["BCKWD"] == pytest.approx(record.predicted_model_s)
        assert by_kind["OPT"] + by_kind["GRADNORM"] == pytest.approx(record.predicted_update_s)
        sync_s = record.predicted_sync_s + record.predicted_hidden_sync_s
        assert by_kind["REDUCE"] + by_kind["GATHER"] == pytest.approx(sync_s)
        samples = 2 * micro_steps * sample_program().batch_size
        assert record.predicted_samples_per_s == pytest.approx(samples / record.predicted_step_s)


def test_what_backs_it_names_the_device() -> None:
    record, _ = predict(inventory_of({"arch": "sn40"}))
    assert record is not None
    assert record.predicted_backed_by.startswith("no published step of SN40L backs this")
    alone, together = (predict(SN30, replicas)[0] for replicas in (1, 2))
    assert alone is not None
    assert together is not None
    assert together.predicted_backed_by.startswith(alone.predicted_backed_by)
    assert together.predicted_backed_by.endswith("no sync of RDUs was ever published"), "of the sync"
    assert "sync" not in alone.predicted_backed_by


def test_a_device_that_is_too_small_is_the_reason() -> None:
    device = SN30.device.model_copy(update={"ddr_capacity_bytes": 1000})
    record, reason = predict(replace(SN30, device=device))
    assert record is None
    assert reason is not None
    assert reason.startswith("one replica needs ")


def test_a_mistake_of_ours_does_not_lose_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(outcome, "predict_compiled", broken)
    assert predict(SN30) == (None, "this is a mistake of sambasim's own, please report it: KeyError: 'x'")
