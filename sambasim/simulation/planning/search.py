"""The search for the best strategies: all are estimated, the best of each shape of the mesh are compiled and priced."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from heapq import nsmallest

from sambasim.costs.cut import Level
from sambasim.costs.fit import Memory
from sambasim.errors import MachineError, OptionError
from sambasim.hardware.budget import load_calibration
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec
from sambasim.simulation.planning.estimate import Estimator
from sambasim.simulation.planning.one_rank import ByDtype
from sambasim.simulation.planning.purchase import Training, Wanted
from sambasim.simulation.planning.strategy import Priced, Space, Strategy, Terms, price, shortage


class Goal(StrEnum):
    """What is best: the most samples/s; the least memory of a rank; the fewest RDU-seconds a sample."""

    THROUGHPUT = "throughput"
    MEMORY = "memory"
    COST = "cost"


@dataclass(frozen=True)
class Plan:
    """`best`: the best strategy of each shape of the mesh, compiled and priced, best first; `others`: mostly estimates;
    `refused`: why the others are impossible; `mean_error`: of predictions, published or here; `largest_layer_bytes`: of
    a module, with gradients and states; `trainings`: of the fastest on each number of RDUs, fewest first."""

    name: str
    hardware: str
    space: Space
    goal: Goal
    best: tuple[Priced, ...]
    others: tuple[Priced, ...]
    refused: Mapping[Strategy, str]
    mean_error: float
    device: str = "RDU"
    note: str = ""
    largest_layer_bytes: int | None = None
    trainings: tuple[Training, ...] = ()

    @property
    def everything(self) -> tuple[Priced, ...]:
        return (*self.best, *self.others)

    @property
    def fitting(self) -> list[Priced]:
        return [candidate for candidate in self.everything if candidate.problem is None]

    @property
    def frontier(self) -> list[Priced]:
        """Of those that were priced, the ones that no other beats in both time and memory, from the fastest on."""
        return _unbeaten([candidate for candidate in self.fitting if candidate.is_exact])


class Planner:
    """`programs` compiles the model for a strategy, for `device` and with sections of `level`."""

    def __init__(self, programs: ByDtype, device: DeviceSpec, cluster: ClusterSpec, level: Level) -> None:
        self._device, self._cluster, self._level = device, cluster, level
        self._error_of: dict[Hashable, tuple[float, float]] = {}
        """Of estimates, in time and in memory, by family."""
        self._program = lru_cache(maxsize=32)(lambda strategy: programs(strategy.dtype).program(strategy))
        self.estimator = Estimator(programs, device, cluster)

    def plan(
        self,
        name: str,
        space: Space,
        goal: Goal,
        count: int = 10,
        on_phase: Callable[[str], None] = lambda phase: None,
        wanted: Wanted | None = None,
    ) -> Plan:
        """Estimate all strategies of `space`, then compile and price the best ones of `count` shapes of the mesh; or,
        of the training that is `wanted`, the fastest one of each number of RDUs."""
        on_phase("estimate all strategies")
        found = {strategy: self.estimator.estimate(strategy) for strategy in space.strategies()}
        estimated = [each for each in found.values() if isinstance(each, Priced)]
        refused = {strategy: each for strategy, each in found.items() if isinstance(each, str)}
        on_phase("compile and price the best")
        of_rdus: defaultdict[int, list[Priced]] = defaultdict(list)
        for candidate in estimated if wanted is not None else ():
            if candidate.problem is None:
                of_rdus[candidate.rdus].append(candidate)
        trainings: list[Training] = []
        if wanted is not None and of_rdus:
            searched = [self._best(of_rdus[rdus], Goal.THROUGHPUT, 1) for rdus in sorted(of_rdus)]
            trainings = [Training(each, wanted) for best, _ in searched for each in best]
            best = sorted((each.priced for each in trainings), key=lambda candidate: order(candidate, goal))
            priced = [each for _, others in searched for each in others]
        else:
            best, priced = self._best(estimated, goal, count)
        known = {candidate.strategy for candidate in (*best, *priced)}
        others = (*priced, *(self._calibrated(each) for each in estimated if each.strategy not in known))
        hardware = f"{space.rdus} {self._device.name} of {self._cluster.name}"
        error = load_calibration().fit.left_out_mean
        largest = self.estimator.ranks.largest_layer_bytes(space.dtypes[0])
        made = (tuple(best), others, refused, error)
        return Plan(name, hardware, space, goal, *made, largest_layer_bytes=largest, trainings=tuple(trainings))

    def _best(self, estimated: Sequence[Priced], goal: Goal, count: int) -> tuple[list[Priced], list[Priced]]:
        """The best of each shape, and what else was priced: the best by estimate is priced, and corrects the others."""

        def corrected(candidate: Priced) -> tuple[float, ...]:
            return order(candidate, goal, self._error_of.get(family(candidate.strategy), (1.0, 1.0)))

        def group(candidate: Priced) -> Hashable:
            return candidate.strategy.shape, family(candidate.strategy)

        fitting = [candidate for candidate in estimated if candidate.problem is None]
        if not fitting:
            fitting = nsmallest(16, estimated, lambda each: each.fullest.total_bytes / each.capacity_bytes)
        left: defaultdict[Hashable, list[Priced]] = defaultdict(list)  # the best one last
        for candidate in sorted(fitting, key=lambda candidate: order(candidate, goal), reverse=True):
            left[group(candidate)].append(candidate)
        waiting = [of_group.pop() for of_group in left.values()]
        best: dict[Hashable, Priced] = {}
        others: list[Priced] = []
        while waiting and len(best) < count:
            candidate = min(waiting, key=corrected)
            waiting.remove(candidate)
            if candidate.strategy.shape in best:
                others += [candidate] if candidate.is_exact else []
            elif candidate.is_exact:
                best[candidate.strategy.shape] = candidate
            else:
                exact = self.exact(candidate.strategy)
                if exact.problem is None:
                    memory_error = exact.fullest.total_bytes / candidate.fullest.total_bytes
                    self._error_of[family(candidate.strategy)] = exact.step_s / candidate.step_s, memory_error
                    waiting.append(exact)
                else:
                    others.append(exact)
                waiting += left[group(candidate)][-1:]
                del left[group(candidate)][-1:]
        in_order = sorted(best.values(), key=lambda candidate: order(candidate, goal))
        others += (candidate for candidate in waiting if candidate.is_exact)
        return in_order, sorted(others, key=lambda candidate: order(candidate, goal))

    def _calibrated(self, estimated: Priced) -> Priced:
        """Times as wrong as where one of its family was compiled, and memory."""
        of_time, of_memory = self._error_of.get(family(estimated.strategy), (1.0, 1.0))
        terms = Terms(*(seconds * of_time for seconds in astuple(estimated.terms)))
        memory = tuple(Memory(*(round(part * of_memory) for part in astuple(rank))) for rank in estimated.memory)
        return replace(estimated, terms=terms, memory=memory, problem=shortage(memory, estimated.capacity_bytes))

    def with_priced_frontier(self, plan: Plan) -> Plan:
        """`plan`, in which the strategies that estimates do not beat are compiled and priced too, at most 32."""
        others = {candidate.strategy: candidate for candidate in plan.others}
        for _ in range(32):
            estimated = next((candidate for candidate in _unbeaten(plan.fitting) if not candidate.is_exact), None)
            if estimated is None:
                break
            others[estimated.strategy] = self.exact(estimated.strategy)
            plan = replace(plan, others=tuple(others.values()))
        return plan

    def exact(self, strategy: Strategy) -> Priced:
        """Compile and price `strategy`; else its estimate, with the problem. Raises OptionError if it is impossible."""
        estimator = self.estimator
        placement = place(strategy.ranks, self._device, strategy.tiles, self._cluster)
        try:
            program = self._program(strategy.compiled_as)
            return price(strategy, program, self._level, estimator.ranks.budget(strategy.tiles), placement)
        except (OptionError, MachineError) as error:
            found = estimator.estimate(strategy)
            if isinstance(found, str):
                raise OptionError(found, remedy="another strategy") from error
            return replace(found, is_exact=True, problem=error.what)


def _unbeaten(strategies: Sequence[Priced]) -> list[Priced]:
    """Those that no other beats in both time and memory, from the fastest on."""
    found: list[Priced] = []
    for candidate in sorted(strategies, key=lambda candidate: (candidate.step_s, candidate.rdu_bytes)):
        if not found or candidate.rdu_bytes < found[-1].rdu_bytes:
            found.append(candidate)
    return found


def family(strategy: Strategy) -> Hashable:
    """Of strategies whose estimates are about equally wrong."""
    return strategy.stages, strategy.tensor, strategy.chips, strategy.tiles, strategy.recompute


def value_of(candidate: Priced, goal: Goal) -> float:
    """What `goal` wants least of."""
    if goal is Goal.MEMORY:
        return candidate.rdu_bytes
    return candidate.in_turns_s * candidate.rdus if goal is Goal.COST else candidate.in_turns_s


def order(candidate: Priced, goal: Goal, error: tuple[float, float] = (1.0, 1.0)) -> tuple[float, ...]:
    """Less is better; of strategies equal to four digits, the plainer one. `error`: factors of time and memory."""
    of_time, of_memory = (1.0, 1.0) if candidate.is_exact else error
    strategy, step_s = candidate.strategy, candidate.in_turns_s * of_time
    about = float(f"{value_of(candidate, goal) * (of_memory if goal is Goal.MEMORY else of_time):.3e}")
    changes = strategy.recompute != "none", strategy.stages, strategy.chips, abs(strategy.zero - 1), strategy.passes
    return about, *changes, step_s
