"""The strategies of a training run: how its ranks divide the model, the batch and the memory.

Legal are those with which ranks fill at most the cluster, and passes the global batch exactly:

    RDUs            replicas × chips × stages, or replicas × tiles / tiles of an RDU
    global batch    replicas × chips (if they share the batch) × samples of a pass × passes of a step

Chips are within a node. Only a replica of one rank may have a part of an RDU.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isqrt
from typing import Literal, TypeAlias

from sambasim.ir.schedule import SCHEDULES
from sambasim.units import counted

TensorParallel: TypeAlias = Literal["none", "weight", "batch"]
"""What is cut over the chips of a replica, as `--tensor-parallel` says."""

RECOMPUTE = ("none", "sections", "full")

VALUES: Mapping[str, Sequence[str]] = {
    "tensor": ("none", "weight", "batch"),
    "schedule": tuple(SCHEDULES),
    "recompute": RECOMPUTE,
    "dtype": ("fp32", "bf16", "fp16"),
}
"""Of the fields of a strategy that are words."""

BY_HOST = 2
"""The level of ZeRO from which gradients and parameters are moved between hosts: see `simulation/scaling.py`."""


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
    def chunks(self) -> int:
        """The stages of each rank of the pipeline."""
        return 2 if self.schedule.startswith("interleaved") and self.stages > 1 else 1

    @property
    def by_host(self) -> bool:
        """Whether replicas sync through their hosts, and not between RDUs."""
        return self.zero >= BY_HOST

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
    """What strategies may use. `tiles` are the parts of an RDU that one replica may have, `tiles_of_rdu` all of it;
    `only` keeps the strategies with these values, by field."""

    rdus: int
    rdus_per_node: int
    global_batch: int
    dtypes: Sequence[str] = ("fp32",)
    tiles: Sequence[int] = ()
    tiles_of_rdu: int | None = None
    only: Mapping[str, Sequence[object]] = field(default_factory=dict)

    def strategies(self) -> Iterator[Strategy]:
        """All legal strategies."""
        for shape in self._shapes():
            for strategy in self._passes(shape):
                yield from filter(self._is_wanted, self._variants(strategy))

    def _is_wanted(self, strategy: Strategy) -> bool:
        """A whole RDU may be named by its number of tiles."""
        given = {"tiles": strategy.tiles or self.tiles_of_rdu}
        return all(given.get(name, getattr(strategy, name)) in values for name, values in self.only.items())

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
                shares = chips if kind == "batch" else 1
                for replicas in self._replicas(left // stages, shares):
                    yield Strategy(replicas, stages, kind, chips)

    def _replicas(self, most: int, shares: int = 1) -> Iterator[int]:
        """The numbers of replicas up to `most` that give each of their `shares` equal parts of the global batch."""
        whole, rest = divmod(self.global_batch, shares)
        return (count for count in divisors(whole) if count <= most) if not rest else iter(())

    def _passes(self, shape: Strategy) -> Iterator[Strategy]:
        """`shape`, with the samples and the number of passes that give the global batch."""
        of_a_copy, rest = divmod(self.global_batch, shape.copies)
        if rest:
            return
        for samples in divisors(of_a_copy):
            passes = of_a_copy // samples
            if shape.stages == 1 or passes >= shape.stages:
                yield replace(shape, samples=samples, passes=passes)

    def _variants(self, strategy: Strategy) -> Iterator[Strategy]:
        schedules = [name for name in SCHEDULES if _has_schedule(strategy, name)] if strategy.stages > 1 else ["1f1b"]
        levels = range(4) if strategy.copies > 1 else (1,)
        for schedule, zero, recompute, dtype in product(schedules, levels, RECOMPUTE, self.dtypes):
            yield replace(strategy, schedule=schedule, zero=zero, recompute=recompute, dtype=dtype)


def _has_schedule(strategy: Strategy, name: str) -> bool:
    return name != "interleaved-1f1b" or strategy.passes % strategy.stages == 0


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
