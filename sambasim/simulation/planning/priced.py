"""What one strategy costs: the step by terms, the memory of its ranks by part, and what the links carry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from sambasim.costs.cut import Level
from sambasim.hardware.budget import Budget
from sambasim.hardware.placement import Placement
from sambasim.ir.program import Program
from sambasim.simulation.memory import Memory, memory_of
from sambasim.simulation.planning.strategy import Strategy
from sambasim.simulation.ranks import price_ranks
from sambasim.simulation.step import step_of
from sambasim.simulation.sync import SyncPath, Wire
from sambasim.units import format_bytes


@dataclass(frozen=True, slots=True)
class Terms:
    """The seconds of a step on its slowest rank: operators of passes, the host, messages within the replica, waiting
    for other stages, the update, and sync that does not overlap with passes."""

    compute_s: float
    host_s: float
    messages_s: float
    bubble_s: float
    update_s: float
    sync_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.host_s + self.messages_s + self.bubble_s + self.update_s + self.sync_s


@dataclass(frozen=True, slots=True)
class Priced:
    """`memory` is that of each rank of the pipeline, of `capacity_bytes`; `received_bytes` what a rank receives in a
    step, by link, and `idle_s` how long it waits for other stages, on average over the pipeline. With `is_exact`, the
    program of this strategy was priced, or could not be compiled; else its time and memory are estimated from one
    without stages. `problem` says why it cannot run."""

    strategy: Strategy
    rdus: int
    terms: Terms
    memory: tuple[Memory, ...]
    capacity_bytes: int
    received_bytes: Mapping[Wire, float]
    is_exact: bool
    problem: str | None = None
    idle_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.terms.step_s

    @property
    def samples_per_s(self) -> float:
        return self.strategy.global_batch / self.step_s

    @property
    def fullest(self) -> Memory:
        return max(self.memory, key=lambda memory: memory.total_bytes)

    @property
    def sharing(self) -> int:
        """The ranks of an RDU."""
        return -(-self.strategy.ranks // self.rdus)

    @property
    def rdu_bytes(self) -> int:
        """Of the fullest RDU."""
        return self.fullest.total_bytes * self.sharing

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks wait for other stages, on average."""
        return self.idle_s / self.step_s


def shortage(memory: Sequence[Memory], capacity_bytes: int) -> str | None:
    """The largest part of the fullest rank, if that has too little memory."""
    stage, fullest = max(enumerate(memory), key=lambda pair: pair[1].total_bytes)
    if fullest.total_bytes <= capacity_bytes:
        return None
    parts = {part.name: getattr(fullest, part.name) for part in fields(fullest)}
    largest = max(parts, key=lambda name: parts[name])
    of_stage = f" of stage {stage}" if len(memory) > 1 else ""
    whole = f"{format_bytes(fullest.total_bytes)} of {format_bytes(capacity_bytes)}"
    return f"memory{of_stage}: {whole}, {format_bytes(parts[largest])} of it {largest}"


def path_of(strategy: Strategy) -> SyncPath:
    return SyncPath.HOST if strategy.by_host else SyncPath.RDU


def rdus_of(placement: Placement) -> int:
    return -(-placement.replicas // placement.per_rdu)


def roomy(budget: Budget) -> Budget:
    """`budget` without a limit: whether it fits is decided by part, with what ZeRO divides."""
    return replace(budget, capacity_bytes=1 << 62)


def price(strategy: Strategy, program: Program, level: Level, budget: Budget, placement: Placement) -> Priced:
    """Price `program`, which was compiled for `strategy`, on the ranks of `placement`. Raises MachineError if an
    operator does not fit on the chip."""
    limitless, steps = roomy(budget), strategy.accumulation_steps
    priced = price_ranks(program, limitless, strategy.samples, steps)
    if strategy.ranks_of_replica == 1 and priced[0].alone.tiers.rest:  # other sections may be faster then
        priced = price_ranks(program, limitless, strategy.samples, steps, level)
    step = step_of(program, priced, placement, path_of(strategy))
    memory = tuple(
        memory_of(
            rank.program,
            activations_bytes=rank.alone.need.between_bytes,
            samples=strategy.samples,
            replicas=strategy.copies,
            passes=strategy.passes,
        )
        for rank in priced
    )
    slowest = max(range(len(step.ranks)), key=lambda at: step.times_of(at).busy_s)
    times = step.times_of(slowest)
    received = sum(times.messages.values(), times.gathered + step.ranks[slowest].synced.moved)
    terms = Terms(
        compute_s=times.device_s,
        host_s=times.host_s,
        messages_s=sum(traffic.predicted_s for traffic in times.messages.values()),
        bubble_s=times.idle_s,
        update_s=times.update_s,
        sync_s=times.exposed_sync_s,
    )
    return Priced(
        strategy,
        rdus_of(placement),
        terms,
        memory,
        budget.capacity_bytes,
        received.received_bytes,
        is_exact=True,
        problem=shortage(memory, budget.capacity_bytes),
        idle_s=step.idle_share * step.passes_s,
    )
