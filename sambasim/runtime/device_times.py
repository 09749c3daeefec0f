"""What the steps of a run would take on devices: predicted beside what was measured, and never mixed with it."""

from sambasim.errors import SambasimError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.placement import Inventory, Placement
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.records.metrics import PredictedRecord
from sambasim.simulation.backing import backing_of
from sambasim.simulation.compiled import CompiledStep, predict_compiled
from sambasim.simulation.sync import SyncPath


def predict_run(
    program: Program, inventory: Inventory, placement: Placement, path: SyncPath, micro_steps: int
) -> tuple[PredictedRecord | None, str | None]:
    """A step of all replicas of `placement`, for the summary; or None, and the reason."""
    step = predicted(program, inventory, placement, path, micro_steps)
    return (None, step) if isinstance(step, str) else (_record(step, inventory), None)


def predicted(
    program: Program, inventory: Inventory, placement: Placement, path: SyncPath, micro_steps: int = 1
) -> CompiledStep | str:
    """A step of all replicas of `placement`; or why there is no prediction. It raises nothing: what was measured is not
    lost to what is shown beside it."""
    try:
        calibration = load_calibration()
        budget = budget_of(inventory.device, calibration, inventory.tiles)
        return predict_compiled(program, budget, calibration, placement, path, micro_steps)
    except SambasimError as error:
        return error.what
    except Exception as error:
        return f"this is a mistake of sambasim's own, please report it: {type(error).__name__}: {error}"


def _record(step: CompiledStep, inventory: Inventory) -> PredictedRecord:
    scaled, by_kind_s = step.scaled, {kind.value: step.of_kind_s(kind) for kind in SectionKind}
    return PredictedRecord(
        predicted_for=inventory.share,
        predicted_step_s=scaled.predicted_s,
        predicted_samples_per_s=scaled.samples_per_s,
        predicted_host_s=scaled.step.host_s,
        predicted_model_s=step.model_s,
        predicted_update_s=step.update_s,
        predicted_sync_s=scaled.exposed_sync_s,
        predicted_hidden_sync_s=scaled.hidden_sync_s,
        predicted_by_kind_s={kind: seconds for kind, seconds in by_kind_s.items() if seconds},
        predicted_sync="none" if scaled.path is None else "device" if scaled.path is SyncPath.RDU else "host",
        predicted_backed_by=backing_of(inventory.device, scaled.placement.replicas),
    )
