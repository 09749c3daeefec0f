"""The seconds that a section is predicted to take on a budget, and what binds it.

A section is a pipeline. Its tensors stream from memory through the stages in tiles of some rows; each beat passes every
tile on by one stage, and lasts as long as the slower of two: the memory, and the slowest stage. Units go to the stages
by their share of the work, but a stage can use no more than hold its weight. With n tiles and s stages there are
n + s - 1 beats: the pipeline fills and drains. Weights come, and their gradients go, once. Those that do not fit on the
chip are laid out part by part, and the smallest tensor that streams is read again for each part.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from sambasim.costs.load import Load, tile_rows
from sambasim.hardware.budget import Budget


class Bound(StrEnum):
    """What a section waits for most."""

    COMPUTE = "compute"
    MEMORY = "memory"
    CAPACITY = "capacity"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class SectionPrice:
    """Predicted seconds of one section. `compute_s` and `memory_s` run at the same time, `fill_s` and `launch_s` come
    on top of the longer of them. `again_s` is the part of `memory_s` that weights cost which do not fit."""

    compute_s: float
    memory_s: float
    fill_s: float
    launch_s: float
    again_s: float

    @property
    def predicted_s(self) -> float:
        """All of it."""
        return max(self.compute_s, self.memory_s) + self.fill_s + self.launch_s

    @property
    def bound(self) -> Bound:
        """What it waits for most."""
        if self.launch_s > max(self.compute_s, self.memory_s) + self.fill_s:
            return Bound.LAUNCH
        if self.compute_s > self.memory_s:
            return Bound.COMPUTE
        return Bound.CAPACITY if self.again_s > self.memory_s / 2 else Bound.MEMORY


def chip_bytes(load: Load) -> int:
    """What a section wants on the chip: its weights, and two tiles of each tensor that passes from stage to stage."""
    return load.resident_bytes + 2 * load.buffered_bytes


def price_of(load: Load, budget: Budget) -> SectionPrice:
    """What `load` is predicted to take as one section."""
    parts = max(1, ceil(load.resident_bytes / budget.chip_bytes))
    again_s = (parts - 1) * load.streamed_bytes / budget.memory_bytes_per_s
    memory_s = load.traffic_bytes / budget.memory_bytes_per_s + again_s
    shared_s = load.product_flops / (budget.units * budget.unit_flops_per_s)
    alone_s = (p.flops / (min(p.units, budget.units) * budget.unit_flops_per_s) for p in load.products)
    compute_s = max(shared_s, *alone_s, 0.0)
    streaming_s = memory_s - load.once_bytes / budget.memory_bytes_per_s
    beats = max(1.0, load.rows / tile_rows(load.rows, budget))
    fill_s = max(compute_s, streaming_s) * (load.stages - 1) / beats
    return SectionPrice(compute_s, memory_s, fill_s, budget.launch_s, again_s)
