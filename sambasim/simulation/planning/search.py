"""The search for the best strategies: all are estimated, and the best of each shape of the mesh are compiled and
priced."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count as count_up
from typing import Any

from sambasim.costs.cut import Level
from sambasim.errors import MachineError, OptionError
from sambasim.hardware.budget import load_calibration
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec
from sambasim.simulation.planning.estimate import Estimator
from sambasim.simulation.planning.one_rank import Programs
from sambasim.simulation.planning.priced import Priced, price
from sambasim.simulation.planning.strategy import Space, Strategy


class Goal(StrEnum):
    """What is best: the most samples/s; the least memory of a rank; the fewest RDU-seconds a sample."""

    THROUGHPUT = "throughput"
    MEMORY = "memory"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class Refused:
    """A strategy without a price, and why it is impossible."""

    strategy: Strategy
    why: str


@dataclass(frozen=True)
class Plan:
    """The plan for the model `name` on `hardware`. `best` has the best strategy of each shape of the mesh, best first;
    each of them was compiled and priced. `others` are all other strategies, mostly as estimated, and `refused` those
    that are impossible. `largest_layer_bytes`: parameters, gradients and states of the module that has the most of
    them, if known. `mean_error`: of predictions of published steps, or on this machine."""

    name: str
    hardware: str
    space: Space
    goal: Goal
    best: tuple[Priced, ...]
    others: tuple[Priced, ...]
    refused: tuple[Refused, ...]
    mean_error: float
    device: str = "RDU"
    note: str = ""
    largest_layer_bytes: int | None = None

    @property
    def everything(self) -> tuple[Priced, ...]:
        return (*self.best, *self.others)

    @property
    def fitting(self) -> list[Priced]:
        return [one for one in self.everything if one.problem is None]

    @property
    def frontier(self) -> list[Priced]:
        """Of those that were priced, the ones that no other beats in both time and memory, from the fastest on."""
        return _unbeaten([one for one in self.fitting if one.is_exact])


class Planner:
    """`programs` compiles the model for a strategy, for `device` and with sections of `level`."""

    def __init__(self, programs: Programs, device: DeviceSpec, cluster: ClusterSpec, level: Level) -> None:
        self._programs, self._device, self._cluster, self._level = programs, device, cluster, level
        self.estimator = Estimator(programs, device, cluster)

    def plan(
        self,
        name: str,
        space: Space,
        goal: Goal,
        count: int = 10,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> Plan:
        """Estimate all strategies of `space`, then compile and price the best ones of `count` shapes of the mesh."""
        estimated: list[Priced] = []
        refused: list[Refused] = []
        on_phase("estimate all strategies")
        for strategy in space.strategies():
            found = self.estimator.estimate(strategy)
            if isinstance(found, Priced):
                estimated.append(found)
            else:
                refused.append(Refused(strategy, found))
        on_phase("compile and price the best")
        best, priced = self._best(estimated, goal, count)
        known = {one.strategy for one in (*best, *priced)}
        others = (*priced, *(one for one in estimated if one.strategy not in known))
        hardware = f"{space.rdus} {self._device.name} of {self._cluster.name}"
        error = load_calibration().fit.left_out_mean
        largest = self.estimator.ranks.largest_layer_bytes(space.dtypes[0])
        return Plan(
            name, hardware, space, goal, tuple(best), others, tuple(refused), error, largest_layer_bytes=largest
        )

    def _best(self, estimated: Sequence[Priced], goal: Goal, count: int) -> tuple[list[Priced], list[Priced]]:
        """The best of each shape, and what else was priced on the way. What is best by estimate is priced, and goes
        back among the others with that price, until it is best again. By how much an estimate was wrong is expected of
        the others of its family too. Where nothing fits by estimate, those that lack the least memory are priced."""

        def put(one: Priced) -> None:
            heappush(waiting, (*order(one, goal, error_of.get(family(one), (1.0, 1.0))), next(number), one))

        fitting = [one for one in estimated if one.problem is None]
        if not fitting:
            fitting = sorted(estimated, key=lambda one: one.fullest.total_bytes / one.capacity_bytes)[:_NEAR_MISSES]
        left: defaultdict[Hashable, list[Priced]] = defaultdict(list)  # by family, the best one last
        for one in sorted(fitting, key=lambda one: order(one, goal), reverse=True):
            left[family(one)].append(one)
        error_of: dict[Hashable, tuple[float, float]] = {}
        waiting: list[Any] = []
        number = count_up()
        for of_family in left.values():
            put(of_family.pop())
        best: dict[Hashable, Priced] = {}
        others: list[Priced] = []
        while waiting and len(best) < count:
            *_, one = heappop(waiting)
            if one.strategy.shape in best:
                others += [one] if one.is_exact else []
            elif one.is_exact:
                best[one.strategy.shape] = one
            else:
                exact = self.exact(one.strategy)
                if exact.problem is None:
                    error_of[family(one)] = (
                        exact.step_s / one.step_s,
                        exact.fullest.total_bytes / one.fullest.total_bytes,
                    )
                    put(exact)
                else:
                    others.append(exact)
                if left[family(one)]:
                    put(left[family(one)].pop())
        in_order = sorted(best.values(), key=lambda one: order(one, goal))
        return in_order, [*others, *(one for *_, one in waiting if one.is_exact)]

    def with_priced_frontier(self, plan: Plan) -> Plan:
        """`plan`, in which the strategies that estimates do not beat are compiled and priced too, at most 32."""
        others = {one.strategy: one for one in plan.others}
        for _ in range(_MOST_OF_FRONTIER):
            estimated = next((one for one in _unbeaten(plan.fitting) if not one.is_exact), None)
            if estimated is None:
                break
            others[estimated.strategy] = self.exact(estimated.strategy)
            plan = replace(plan, others=tuple(others.values()))
        return plan

    def exact(self, strategy: Strategy) -> Priced:
        """Compile `strategy` and price its program. What cannot be compiled keeps its estimate, with the problem.
        Raises OptionError if it is impossible without stages too."""
        estimator = self.estimator
        placement = place(strategy.ranks, self._device, strategy.tiles, self._cluster)
        try:
            program = self._programs.program(strategy)
            return price(strategy, program, self._level, estimator.ranks.budget(strategy), placement)
        except (OptionError, MachineError) as error:
            found = estimator.estimate(strategy)
            if isinstance(found, str):
                raise OptionError(found, remedy="another strategy") from error
            return replace(found, is_exact=True, problem=error.what)


def _unbeaten(strategies: Sequence[Priced]) -> list[Priced]:
    """Those that no other beats in both time and memory, from the fastest on."""
    found: list[Priced] = []
    for one in sorted(strategies, key=lambda one: (one.step_s, one.rdu_bytes)):
        if not found or one.rdu_bytes < found[-1].rdu_bytes:
            found.append(one)
    return found


def family(one: Priced) -> Hashable:
    """Of estimates that are about equally wrong."""
    return one.strategy.shape, one.strategy.recompute


_NEAR_MISSES = 16
"""Strategies that are priced where nothing fits by estimate."""


_MOST_OF_FRONTIER = 32


def value_of(one: Priced, goal: Goal) -> float:
    """What `goal` wants least of."""
    if goal is Goal.MEMORY:
        return one.rdu_bytes
    return one.step_s * one.rdus if goal is Goal.COST else one.step_s


def order(one: Priced, goal: Goal, error: tuple[float, float] = (1.0, 1.0)) -> tuple[float, ...]:
    """Less is better. Of those that are equal to four digits, the one that changes less is better. `error`: by which
    the time and the memory of an estimate are multiplied."""
    of_time, of_memory = (1.0, 1.0) if one.is_exact else error
    strategy, step_s = one.strategy, one.step_s * of_time
    about = float(f"{value_of(one, goal) * (of_memory if goal is Goal.MEMORY else of_time):.3e}")
    changes = strategy.recompute != "none", strategy.stages, strategy.chips, abs(strategy.zero - 1), strategy.passes
    return about, *changes, step_s
