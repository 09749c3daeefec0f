"""What the page tells of a PEF, predicted once and read by all parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.costs.cut import Level
from sambasim.costs.price import Bound
from sambasim.costs.work import Work, work_of
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.calibration import load_calibration
from sambasim.hardware.cluster import ClusterSpec
from sambasim.hardware.placement import place
from sambasim.hardware.spec import DeviceSpec
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.simulation.scaling import ScaledStep, scale
from sambasim.simulation.step import PredictedStep, predict_step
from sambasim.simulation.sync import SyncPath

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Of the curves, unless others are asked for, as far as a cluster has room for them."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The step of one replica, `alone`, and of many: by path, in ascending order of replicas. `tiles` is None for the
    whole device, `work` is that of the step's graph."""

    program: Program
    device: DeviceSpec
    tiles: int | None
    level: Level
    cluster: ClusterSpec
    work: Work
    alone: PredictedStep
    scaled: Mapping[SyncPath, Sequence[ScaledStep]]

    @property
    def graph(self) -> Graph:
        """Of the training step, or the forward of a program without one."""
        return self.program.training or self.program.evaluation

    @property
    def shown(self) -> int:
        """Which of `scaled` the timeline shows: the most that one node has room for, of more than one."""
        counts = [scaled.placement.replicas for scaled in self.scaled[SyncPath.RDU]]
        full = self.scaled[SyncPath.RDU][0].placement.per_full_node
        several = [number for number, count in enumerate(counts) if count > 1]
        inside = [number for number in several if counts[number] <= full]
        return inside[-1] if inside else several[0] if several else 0


def predict(
    program: Program,
    device: DeviceSpec,
    tiles: int | None,
    level: Level,
    cluster: ClusterSpec,
    replicas: Sequence[int] | None = None,
) -> Prediction:
    """All of it. Raises OptionError for replicas that `cluster` has no room for, and what `predict_step` raises."""
    calibration = load_calibration()
    alone = predict_step(program, budget_of(device, calibration, tiles), level, calibration)
    seats = []
    for count in replicas or REPLICAS:
        try:
            seats.append(place(count, device, tiles, cluster))
        except OptionError:
            if replicas or not seats:
                raise
    scaled = {path: tuple(scale(program, alone, seat, path) for seat in seats) for path in SyncPath}
    graph = program.training or program.evaluation
    return Prediction(program, device, tiles, level, cluster, work_of(graph, program.symbols), alone, scaled)


def bound_words(prediction: Prediction, bound: Bound) -> str:
    """What binds a section, as people say it."""
    words = {Bound.MEMORY: prediction.alone.budget.memory, Bound.CAPACITY: "room on the chip"}
    return words.get(bound, bound.value)
