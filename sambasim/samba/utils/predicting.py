"""The time of a step that is predicted for a device, which is printed beside the measured one."""

from pydantic import JsonValue
from torch import nn

from sambasim.hardware.placement import Inventory, inventory_of, place_replicas
from sambasim.runtime.device_times import predicted
from sambasim.samba import context
from sambasim.samba.session import session
from sambasim.simulation.backing import backing_of
from sambasim.simulation.compiled import CompiledStep
from sambasim.simulation.sync import SyncPath

NOT_PREDICTED = "-"
"""The cell of a table without a prediction; in JSON it is null."""


class DeviceColumn:
    """A step of the PEF that is loaded for `model`, on the device for which it was compiled. `step` is None where there
    is no prediction, and `reason` says why."""

    def __init__(self, model: nn.Module, *, data_parallel: bool, reduce_on_rdu: bool) -> None:
        document, world = session.document(model), context.communicator()
        self.inventory: Inventory = inventory_of(document.compile_options)
        placement = place_replicas(self.inventory, world.node_of if data_parallel else [world.node_index])
        path = SyncPath.RDU if reduce_on_rdu else SyncPath.HOST
        found = predicted(document.program, self.inventory, placement, path)
        self.step: CompiledStep | None = None if isinstance(found, str) else found
        self.reason = found if isinstance(found, str) else None
        self._backing = backing_of(self.inventory.device, placement.replicas)

    def figures(self) -> dict[str, JsonValue]:
        """The device and the evidence for the prediction; or why there is no prediction."""
        if self.reason is not None:
            return {"not_predicted": self.reason}
        return {"predicted_for": self.inventory.share, "predicted_backed_by": self._backing}

    def told(self) -> str:
        """The same in a line."""
        if self.reason is not None:
            return f"no prediction for a device: {self.reason}\n"
        return f"predicted: for {self.inventory.share}; {self._backing}\n"
