"""The predicted steps of a program on a device, by number of replicas and sync path, and how far they may be off."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from sambasim.costs.cut import Level
from sambasim.costs.price import Bound
from sambasim.costs.work import work_of
from sambasim.errors import OptionError
from sambasim.hardware.budget import Mapper, budget_of, load_calibration
from sambasim.hardware.placement import Placement, place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, load_device
from sambasim.ir.graph import Graph
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.simulation.alone import RankAlone, price_ranks
from sambasim.simulation.step import PredictedStep, step_of
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""The default numbers of replicas; those that do not fit on the cluster are left out."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The steps of a program, by sync path and number of replicas. `tiles` are those of a rank, None for the whole
    device. With a `level`, the sections of a replica of one rank are cut again; those of others are as compiled."""

    program: Program
    device: DeviceSpec
    tiles: int | None
    level: Level
    cluster: ClusterSpec
    steps: Mapping[SyncPath, Sequence[PredictedStep]]

    @property
    def graph(self) -> Graph:
        return self.program.leading

    @property
    def alone(self) -> RankAlone:
        """Rank 0 by itself: the step of a replica of one rank."""
        return self.steps[SyncPath.RDU][0].alone

    def on_a_node(self, path: SyncPath) -> PredictedStep:
        """The step with the most replicas that fit on one node, but more than one if there is one."""
        several = [step for step in self.steps[path] if step.placement.replicas > 1]
        inside = [step for step in several if step.placement.replicas <= step.placement.per_full_node]
        return [*self.steps[path][:1], *several[:1], *inside][-1]

    def along(self, paths: Sequence[SyncPath]) -> list[PredictedStep]:
        """For each number of replicas, the step of each of `paths`, or one if there is nothing to sync."""
        of_counts = zip(*(self.steps[path] for path in paths), strict=True)
        return [step for steps in of_counts for step in (steps if steps[0].path is not None else steps[:1])]


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
    mapped_by: Mapper = "compiler",
) -> Prediction:
    """For passes of `batch_size`. Raises as `price_ranks`, and OptionError if `replicas` do not fit on `cluster`."""
    each, places = program.ranks_of_replica, list[Placement]()
    for count in replicas or REPLICAS:
        try:
            places.append(place(count * each, device, tiles, cluster, "replica" if each == 1 else "rank"))
        except OptionError:
            if replicas or not places:
                raise
    budget = budget_of(device, tiles, mapped_by)
    ranks = price_ranks(program, budget, batch_size, micro_steps, level if each == 1 else None)
    steps = {path: tuple(step_of(program, ranks, place, path) for place in places) for path in SyncPath}
    return Prediction(program, device, tiles, level, cluster, steps)


PRICED_IN = "priced in bf16, whatever dtype the PEF has or --wire sends; losses in float32, updates as kept in memory"


def backing_of(device: DeviceSpec, replicas: int = 1) -> str:
    """Which published measurements back a prediction for `replicas` on `device`: a clause without a full stop."""
    fit = load_calibration().fit
    text = (
        f"no published step of {device.name} backs this: its figures are published or marked as estimates, and"
        f" efficiencies are those of {fit.device}; for HBM, that of the SN40L paper"
    )
    if device == load_device(fit.arch):
        off = f"within {fit.left_out_mean:.0%} in the mean and {fit.left_out_worst:.0%} at worst"
        left_out = f"those of a width that was left out are predicted {off}"
        text = f"calibrated on {fit.rows}; {left_out}; other models may be further off"
    return f"{text}; no sync of RDUs was ever published" if replicas > 1 else text


def zero_note(program: Program) -> list[str]:
    included = f"ZeRO {program.zero} is included in times with host sync; device sync ignores it, as in a run"
    return [f"{included}; predicted memory is that of the fewest replicas"] if program.zero > 1 else []


class Likely(NamedTuple):
    least_s: float
    most_s: float
    basis: str

    @property
    def range(self) -> str:
        """`2.97 to 3.88 s`."""
        least, most = format_seconds(self.least_s), format_seconds(self.most_s)
        number, _, unit = least.partition(" ")
        return f"{number if unit == most.partition(' ')[2] else least} to {most}"


def likely(prediction: Prediction) -> Likely | None:
    """By errors of widths that were left out. None for another device, forwards, recurrent layers, or many launches."""
    fit, step = load_calibration().fit, prediction.alone
    is_backed = prediction.device == load_device(fit.arch) and prediction.program.training is not None
    if not is_backed or is_recurrent(prediction) or step.device_s_by_bound[Bound.LAUNCH] > step.device_s / 2:
        return None
    worst, basis = fit.left_out_worst, "as the worst step that was left out"
    if not _is_alike(prediction):
        worst, basis = 2 * worst, "twice the worst that was left out: those are wider, without convolutions"
    basis = f"device time off by {worst:.0%}, {basis}; host time by {fit.worst_host_error:.0%}"
    # Errors are relative to what was measured.
    least_s = step.device_s / (1 + worst) + step.host_s / (1 + fit.worst_host_error)
    most_s = step.device_s / (1 - worst) + step.host_s / (1 - fit.worst_host_error)
    return Likely(least_s, most_s, basis)


def _is_alike(prediction: Prediction) -> bool:
    """Whether most FLOPs are of products as wide as the published ones, and not of convolutions."""
    work = work_of(prediction.graph, prediction.program.symbols)
    products = [stage for stage in work.stages if stage.product_flops]
    alike = (stage.product_flops for stage in products if stage.blocks == inf and stage.columns >= 480)
    return not products or 2 * sum(alike) > sum(stage.product_flops for stage in products)


def is_recurrent(prediction: Prediction) -> bool:
    """Whether the program has recurrent layers, whose dependency between time steps is not modelled."""
    return any(OPERATORS[node.operator].kind is OperatorKind.RECURRENT for node in prediction.graph.nodes)
