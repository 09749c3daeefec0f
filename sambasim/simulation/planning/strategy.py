"""The strategies of a training run: how its ranks divide the model, the batch and the memory. Legal are those with
which ranks fill at most the cluster, and passes the global batch exactly; chips are within a node:

    RDUs            replicas × chips × stages, or, of replicas of one rank, replicas × tiles / tiles of an RDU
    global batch    replicas × chips (if they share the batch) × samples of a pass × passes of a step
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import isqrt
from typing import Literal, TypeAlias

from sambasim.costs.cut import Level
from sambasim.costs.fit import Memory
from sambasim.hardware.budget import Budget
from sambasim.hardware.placement import Placement
from sambasim.ir.program import Program
from sambasim.ir.schedule import SCHEDULES
from sambasim.simulation.alone import price_ranks
from sambasim.simulation.memory import RECOMPUTE
from sambasim.simulation.step import step_of
from sambasim.simulation.sync import SyncPath, Wire
from sambasim.units import counted, format_bytes

TensorParallel: TypeAlias = Literal["none", "weight", "batch"]
"""What is cut over the chips of a replica, as `--tensor-parallel` says."""

VALUES: Mapping[str, Sequence[str]] = {
    "tensor": ("none", "weight", "batch"), "schedule": tuple(SCHEDULES), "recompute": RECOMPUTE,
    "dtype": ("fp32", "bf16", "fp16"),
}  # fmt: skip
"""Of the fields of a strategy that are words."""

BY_HOST = 2  # the ZeRO level from which gradients and parameters are moved between hosts: see `simulation/scaling.py`


@dataclass(frozen=True, slots=True)
class Strategy:
    """`samples` are those of one pass of a rank, and `passes` those of one optimizer step: the micro-batches of a
    pipeline, or else accumulation steps. `tiles` is None for a whole RDU."""

    replicas: int
    stages: int = 1
    tensor: TensorParallel = "none"
    chips: int = 1
    zero: int = 1
    samples: int = 1
    passes: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    dtype: str = "fp32"
    tiles: int | None = None

    @property
    def ranks_of_replica(self) -> int:
        return self.chips * self.stages

    @property
    def ranks(self) -> int:
        return self.replicas * self.ranks_of_replica

    @property
    def batch_chips(self) -> int:
        """The chips of a replica that share its batch."""
        return self.chips if self.tensor == "batch" else 1

    @property
    def copies(self) -> int:
        """Of each parameter: the ranks along dp."""
        return self.replicas * self.batch_chips

    @property
    def micro_batches(self) -> int:
        return self.passes if self.stages > 1 else 1

    @property
    def accumulation_steps(self) -> int:
        return 1 if self.stages > 1 else self.passes

    @property
    def batch_size(self) -> int:
        """Of one replica, in one micro-step: the batch size of a config."""
        return self.samples * self.micro_batches * self.batch_chips

    @property
    def global_batch(self) -> int:
        return self.copies * self.samples * self.passes

    @property
    def compiled_as(self) -> "Strategy":
        """One with the same program, whatever the numbers of replicas and of accumulation steps are."""
        passes = self.passes if self.stages > 1 else 1
        return replace(self, replicas=min(self.replicas, 2), passes=passes)

    @property
    def chunks(self) -> int:
        return 2 if self.schedule.startswith("interleaved") and self.stages > 1 else 1

    @property
    def path(self) -> SyncPath:
        """How replicas sync: through their hosts, or between RDUs."""
        return SyncPath.HOST if self.zero >= BY_HOST else SyncPath.RDU

    @property
    def shape(self) -> Hashable:
        """How the ranks are divided, without what each of them does. Chips that share a batch are as replicas are."""
        return self.copies, self.stages, self.ranks, self.tiles

    def __str__(self) -> str:
        """`dp 8 × pp 4 × tp 2, ZeRO 1, 4 samples × 16 passes, 1f1b`, without what is not used."""
        axes = [f"dp {self.replicas}"]
        axes += [f"pp {self.stages}"] * (self.stages > 1)
        axes += [f"tp {self.chips}{' (batch)' if self.tensor == 'batch' else ''}"] * (self.chips > 1)
        parts = [" × ".join(axes)]
        parts += [counted(self.tiles, "tile")] if self.tiles is not None else []
        parts += [f"ZeRO {self.zero}"] * (self.copies > 1)
        parts.append(f"{counted(self.samples, 'sample')} × {counted(self.passes, 'pass', 'passes')}")
        parts += [self.schedule] * (self.stages > 1)
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        parts += [self.dtype] * (self.dtype != "fp32")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Space:
    """What strategies may use: of `tiles_of_rdu`, one replica may have `tiles`; `only` keeps these values, by field."""

    rdus: int
    rdus_per_node: int
    global_batch: int
    dtypes: Sequence[str] = ("fp32",)
    tiles: Sequence[int] = ()
    tiles_of_rdu: int | None = None
    only: Mapping[str, Sequence[object]] = field(default_factory=dict)

    def strategies(self) -> Iterator[Strategy]:
        """All legal strategies. A whole RDU may be named by its number of tiles."""
        of_copies = (strategy for shape in self._shapes() for strategy in self._with_passes(shape))
        for strategy in (variant for each in of_copies for variant in self._variants(each)):
            given = {"tiles": strategy.tiles or self.tiles_of_rdu}
            if all(given.get(name, getattr(strategy, name)) in values for name, values in self.only.items()):
                yield strategy

    def _shapes(self) -> Iterator[Strategy]:
        """Replicas, stages, chips and tiles: those that fill at most the cluster, and can share the batch evenly."""
        for tiles in self.tiles:
            whole = self.tiles_of_rdu or tiles
            yield from (Strategy(replicas, tiles=tiles) for replicas in self._replicas(self.rdus * (whole // tiles)))
        for chips in divisors(self.rdus_per_node):
            kinds: Sequence[TensorParallel] = ("none",) if chips == 1 else ("weight", "batch")
            left = self.rdus // chips
            powers = {1 << power for power in range(left.bit_length())}
            for kind, stages in product(kinds, sorted({*divisors(left), *powers} if left else ())):
                for replicas in self._replicas(left // stages, chips if kind == "batch" else 1):
                    yield Strategy(replicas, stages, kind, chips)

    def _replicas(self, most: int, shares: int = 1) -> Iterator[int]:
        """The numbers of replicas up to `most` that give each of their `shares` equal parts of the global batch."""
        whole, rest = divmod(self.global_batch, shares)
        return (count for count in divisors(whole) if count <= most) if not rest else iter(())

    def _with_passes(self, shape: Strategy) -> Iterator[Strategy]:
        of_a_copy, rest = divmod(self.global_batch, shape.copies)
        for samples in divisors(of_a_copy) if not rest else ():
            passes = of_a_copy // samples
            if shape.stages == 1 or passes >= shape.stages:
                yield replace(shape, samples=samples, passes=passes)

    def _variants(self, strategy: Strategy) -> Iterator[Strategy]:
        schedules, levels = ["1f1b"], (1, 2, 3) if strategy.copies > 1 else (1,)
        if strategy.stages > 1:
            is_even = strategy.passes % strategy.stages == 0
            schedules = [name for name in SCHEDULES if name != "interleaved-1f1b" or is_even]
        for schedule, zero, recompute, dtype in product(schedules, levels, RECOMPUTE, self.dtypes):
            yield replace(strategy, schedule=schedule, zero=zero, recompute=recompute, dtype=dtype)


def divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds on the slowest rank; `bubble_s`: waiting for stages; `sync_s`: what does not overlap with passes."""

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
    """`memory`: of each rank of the pipeline; `received_bytes`: by link, in a step. `is_exact`: its own program was
    priced, or could not be compiled; else these are estimates from one without stages. `problem`: why it cannot run."""

    strategy: Strategy
    rdus: int
    terms: Terms
    memory: tuple[Memory, ...]
    capacity_bytes: int
    received_bytes: Mapping[Wire, float]
    is_exact: bool
    problem: str | None = None

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
    def in_turns_s(self) -> float:
        """The step, if the replicas of an RDU take turns at its link to the host. By it strategies are ranked."""
        return self.step_s + (self.sharing - 1) * self.terms.host_s

    @property
    def rdu_bytes(self) -> int:
        """Of the fullest RDU."""
        return self.fullest.total_bytes * self.sharing


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


def rdus_of(placement: Placement) -> int:
    return -(-placement.replicas // placement.per_rdu)


def roomy(budget: Budget) -> Budget:
    """`budget` without a limit: whether it fits is decided by part, with what ZeRO divides."""
    return replace(budget, capacity_bytes=1 << 62)


def price(strategy: Strategy, program: Program, level: Level, budget: Budget, placement: Placement) -> Priced:
    """Price the `program` of `strategy`. Raises MachineError if an operator does not fit on the chip."""
    limitless, samples, steps = roomy(budget), strategy.samples, strategy.accumulation_steps
    priced = price_ranks(program, limitless, samples, steps)
    if strategy.ranks_of_replica == 1 and priced[0].tiers.rest:  # other sections may be faster then
        priced = price_ranks(program, limitless, samples, steps, level)
    step = step_of(program, priced, placement, strategy.path)
    slowest = max(range(len(step.ranks)), key=lambda at: step.times_of(at).busy_s)
    times = step.times_of(slowest)
    received = sum(times.messages.values(), times.gathered + step.ranks[slowest].synced.moved)
    messages_s = sum(traffic.predicted_s for traffic in times.messages.values())
    terms = Terms(times.device_s, times.host_s, messages_s, times.idle_s, times.update_s, times.exposed_sync_s)
    rdus, capacity_bytes = rdus_of(placement), budget.capacity_bytes
    problem = shortage(step.memory, capacity_bytes)
    return Priced(strategy, rdus, terms, step.memory, capacity_bytes, received.received_bytes, True, problem)
