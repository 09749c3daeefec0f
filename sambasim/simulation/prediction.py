"""All that is predicted of a program on a device: one replica, and many, by every way to sync."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.costs.cut import Level
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.placement import Placement, place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.simulation.scaling import ScaledStep, scale
from sambasim.simulation.step import PredictedStep, predict_step
from sambasim.simulation.sync import SyncPath

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Those of a prediction, unless others are asked for, as far as a cluster has room for them."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The step of one replica, `alone`, and of many: by path, in the order that was asked for. `tiles` is None for the
    whole device."""

    program: Program
    device: DeviceSpec
    tiles: int | None
    level: Level
    cluster: ClusterSpec
    alone: PredictedStep
    scaled: Mapping[SyncPath, Sequence[ScaledStep]]

    @property
    def graph(self) -> Graph:
        """Of the training step, or the forward of a program without one."""
        return self.program.training or self.program.evaluation


def predict(
    program: Program,
    device: DeviceSpec,
    tiles: int | None,
    level: Level,
    cluster: ClusterSpec,
    replicas: Sequence[int] | None = None,
    *,
    batch_size: int | None = None,
    micro_steps: int = 1,
) -> Prediction:
    """All of it. Raises OptionError for replicas that `cluster` has no room for, and what `predict_step` raises."""
    calibration = load_calibration()
    budget = budget_of(device, calibration, tiles)
    seats = _seats(device, tiles, cluster, replicas)
    alone = predict_step(program, budget, level, calibration, batch_size, micro_steps)
    scaled = {path: tuple(scale(program, alone, seat, path) for seat in seats) for path in SyncPath}
    return Prediction(program, device, tiles, level, cluster, alone, scaled)


def _seats(
    device: DeviceSpec, tiles: int | None, cluster: ClusterSpec, replicas: Sequence[int] | None
) -> list[Placement]:
    seats: list[Placement] = []
    for count in replicas or REPLICAS:
        try:
            seats.append(place(count, device, tiles, cluster))
        except OptionError:
            if replicas or not seats:
                raise
    return seats
