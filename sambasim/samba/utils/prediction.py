"""The prediction that is printed beside what `measure_performance` and `measure_sections` measure."""

from pydantic import JsonValue
from torch import nn

from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.graph import SectionKind
from sambasim.runtime.outcome import predicted
from sambasim.samba import joining
from sambasim.samba.session import session
from sambasim.simulation.prediction import backing_of
from sambasim.simulation.step import PredictedStep, has_several_ranks
from sambasim.simulation.sync import SyncPath


class Prediction:
    """The prediction of a step of the loaded PEF on its device.

    step: None without a prediction
    figures, text: device and source of the prediction, or why there is none, for JSON and as a line
    """

    def __init__(self, model: nn.Module, *, data_parallel: bool, reduce_on_rdu: bool) -> None:
        document, world = session.document(model), joining.communicator()
        inventory = inventory_of(document.compile_options)
        nodes = world.node_of if data_parallel else [world.node_index]
        placement = place_replicas(inventory, nodes, document.program.ranks_of_replica)
        step = predicted(document.program, inventory, placement, SyncPath.RDU if reduce_on_rdu else SyncPath.HOST)
        self.step: PredictedStep | None = None
        if isinstance(step, str) or has_several_ranks(document.program):
            why = step if isinstance(step, str) else "sambasim simulate predicts a replica of several ranks"
            self.figures: dict[str, JsonValue] = {"not_predicted": why}
            self.text = f"no prediction for a device: {why}"
        else:
            self.step, backing = step, backing_of(inventory.device, placement.replicas)
            self.figures = {"predicted_for": inventory.share, "predicted_backed_by": backing}
            self.text = f"predicted: for {inventory.share}; {backing}"

    def step_s(self, *, forward_only: bool, graph_only: bool) -> float | None:
        """The predicted time of a measured step."""
        if self.step is None:
            return None
        if forward_only:
            return self.step.of_kind_s(SectionKind.FWD) if graph_only else self.step.forward_s
        return self.step.graph_s if graph_only else self.step.predicted_s
