"""The predicted step of a run, which its summary has beside what was measured."""

from sambasim.errors import SambasimError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import Inventory, Placement
from sambasim.ir.graph import SectionKind
from sambasim.ir.mesh import copy_mesh
from sambasim.ir.program import Program
from sambasim.records.metrics import PredictedRecord
from sambasim.simulation.alone import price_ranks
from sambasim.simulation.prediction import backing_of
from sambasim.simulation.step import PredictedStep, step_of
from sambasim.simulation.sync import SyncPath


def predicted(
    program: Program, inventory: Inventory, placement: Placement, path: SyncPath, micro_steps: int = 1
) -> PredictedStep | str:
    """A step of all replicas of `placement`; or why there is no prediction: it must not lose what was measured."""
    try:
        ranks = price_ranks(program, budget_of(inventory.device, inventory.tiles), micro_steps=micro_steps)
        return step_of(program, ranks, placement, path)
    except SambasimError as error:
        return error.what
    except Exception as error:
        return f"this is a mistake of sambasim's own, please report it: {type(error).__name__}: {error}"


def predicted_record(step: PredictedStep, inventory: Inventory) -> PredictedRecord:
    ranks, several = step.placement.replicas, copy_mesh(step.program.mesh).world_size > 1
    backed_by = backing_of(inventory.device, ranks)
    by_kind_s = {kind.value: step.of_kind_s(kind) for kind in SectionKind}
    return PredictedRecord(
        predicted_for=f"{ranks} × {inventory.share}" if several else inventory.share,
        predicted_step_s=step.predicted_s,
        predicted_samples_per_s=step.samples_per_s,
        predicted_host_s=step.first.host_s,
        predicted_model_s=step.first.device_s,
        predicted_waited_s=dict(step.waited_s),
        predicted_update_s=step.first.update_s,
        predicted_sync_s=step.first.exposed_sync_s,
        predicted_hidden_sync_s=step.synced.hidden_sync_s,
        predicted_by_kind_s={kind: seconds for kind, seconds in by_kind_s.items() if seconds},
        predicted_sync="none" if step.path is None else "device" if step.path is SyncPath.RDU else "host",
        predicted_backed_by=f"{backed_by}; nor a message within a replica" if several else backed_by,
    )
