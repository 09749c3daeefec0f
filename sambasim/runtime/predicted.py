"""The predicted time of a step, beside the measured ones."""

from sambasim.errors import SambasimError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.placement import Inventory, Placement
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.records.metrics import PredictedRecord
from sambasim.simulation.compiled import CompiledStep, predict_compiled
from sambasim.simulation.mesh import MeshStep, has_several_ranks, predict_mesh
from sambasim.simulation.prediction import backing_of
from sambasim.simulation.sync import SyncPath


def predicted(
    program: Program, inventory: Inventory, placement: Placement, path: SyncPath, micro_steps: int = 1
) -> CompiledStep | MeshStep | str:
    """A step of all replicas of `placement`; or why there is no prediction: it must not lose what was measured."""
    try:
        calibration = load_calibration()
        budget = budget_of(inventory.device, calibration, inventory.tiles)
        predict = predict_mesh if has_several_ranks(program) else predict_compiled
        return predict(program, budget, calibration, placement, path, micro_steps)
    except SambasimError as error:
        return error.what
    except Exception as error:
        return f"this is a mistake of sambasim's own, please report it: {type(error).__name__}: {error}"


def predicted_record(step: CompiledStep | MeshStep, inventory: Inventory) -> PredictedRecord:
    of_mesh = isinstance(step, MeshStep)
    scaled, waited_s = (step, dict(step.waited_s)) if isinstance(step, MeshStep) else (step.scaled, {})
    ranks = scaled.placement.replicas
    backed_by = backing_of(inventory.device, ranks)
    by_kind_s = {kind.value: step.of_kind_s(kind) for kind in SectionKind}
    return PredictedRecord(
        predicted_for=f"{ranks} × {inventory.share}" if of_mesh else inventory.share,
        predicted_step_s=scaled.predicted_s,
        predicted_samples_per_s=scaled.samples_per_s,
        predicted_host_s=step.host_s,
        predicted_model_s=step.model_s,
        predicted_waited_s=waited_s,
        predicted_update_s=step.update_s,
        predicted_sync_s=scaled.exposed_sync_s,
        predicted_hidden_sync_s=scaled.hidden_sync_s,
        predicted_by_kind_s={kind: seconds for kind, seconds in by_kind_s.items() if seconds},
        predicted_sync="none" if scaled.path is None else "device" if scaled.path is SyncPath.RDU else "host",
        predicted_backed_by=f"{backed_by}; nor a message within a replica" if of_mesh else backed_by,
    )
