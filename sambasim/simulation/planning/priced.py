"""What one strategy costs: the step by terms, the memory of its ranks by part, and what the links carry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from sambasim.costs.cut import Level
from sambasim.costs.fit import check_chip
from sambasim.costs.work import at_batch_size, work_of
from sambasim.hardware.budget import Budget, Calibration
from sambasim.hardware.placement import Placement
from sambasim.ir.program import Program
from sambasim.simulation.memory import Memory, memory_of
from sambasim.simulation.mesh import mesh_step
from sambasim.simulation.planning.strategy import Strategy
from sambasim.simulation.ranks import price_ranks
from sambasim.simulation.scaling import scale
from sambasim.simulation.step import MODEL_KINDS, pieces_as_compiled, predict_step, price_pieces
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
        return max(self.memory, key=lambda one: one.total_bytes)

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
    parts = {one.name: getattr(fullest, one.name) for one in fields(fullest)}
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


def price(
    strategy: Strategy, program: Program, level: Level, budget: Budget, calibration: Calibration, placement: Placement
) -> Priced:
    """Price `program`, which was compiled for `strategy`, on the ranks of `placement`. Raises MachineError if an
    operator does not fit on the chip."""
    if strategy.ranks_of_replica == 1:
        return _of_one_rank(strategy, program, level, budget, calibration, placement)
    priced = price_ranks(program, roomy(budget), calibration, strategy.samples)
    step = mesh_step(program, priced, placement, path_of(strategy), strategy.accumulation_steps)
    memory = tuple(
        memory_of(
            one.program,
            activations_bytes=one.alone.need.between_bytes,
            samples=strategy.samples,
            replicas=strategy.copies,
            passes=strategy.passes,
        )
        for one in priced
    )
    slowest = max(range(len(step.ranks)), key=lambda at: step.times_of(at).busy_s)
    times = step.times_of(slowest)
    received = sum(times.messages.values(), times.gathered)
    sync = step.ranks[slowest].scaled.received_bytes
    terms = Terms(
        compute_s=times.device_s,
        host_s=times.host_s,
        messages_s=sum(one.predicted_s for one in times.messages.values()),
        bubble_s=times.idle_s,
        update_s=times.update_s,
        sync_s=times.exposed_sync_s,
    )
    wires = {**received.received_bytes, **sync}
    return Priced(
        strategy,
        rdus_of(placement),
        terms,
        memory,
        budget.capacity_bytes,
        {wire: received.received_bytes.get(wire, 0.0) + sync.get(wire, 0.0) for wire in wires},
        is_exact=True,
        problem=shortage(memory, budget.capacity_bytes),
        idle_s=step.idle_share * step.passes_s,
    )


def _of_one_rank(
    strategy: Strategy, program: Program, level: Level, budget: Budget, calibration: Calibration, placement: Placement
) -> Priced:
    graph, samples = program.leading, strategy.samples
    work = at_batch_size(work_of(graph, program.symbols), program.batch_size, samples)
    check_chip(graph, work, budget)
    alone = price_pieces(
        program, work, pieces_as_compiled(graph, work), roomy(budget), calibration, samples, strategy.passes
    )
    if alone.tiers.rest:  # other sections may be faster then
        alone = predict_step(program, roomy(budget), level, calibration, samples, strategy.passes)
    scaled = scale(program, alone, placement, path_of(strategy))
    step = scaled.step
    memory = memory_of(
        program,
        activations_bytes=alone.need.between_bytes,
        samples=strategy.samples,
        replicas=strategy.copies,
        passes=strategy.passes,
    )
    passes_s = sum(step.runs(one) * one.price.predicted_s for one in step.sections if one.kind in MODEL_KINDS)
    return Priced(
        strategy,
        rdus_of(placement),
        Terms(passes_s, step.host_s, 0.0, 0.0, step.device_s - passes_s, scaled.exposed_sync_s),
        (memory,),
        budget.capacity_bytes,
        scaled.received_bytes,
        is_exact=True,
        problem=shortage((memory,), budget.capacity_bytes),
    )
