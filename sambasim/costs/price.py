"""The seconds that a section is predicted to take on a budget, and what binds it.

A section is a pipeline. Its tensors stream from memory through the stages in tiles of some rows; each beat passes every
tile on by one stage, and lasts as long as the slower of two: the memory, and the slowest stage. Units go to the stages
by their share of the work, but a stage can use no more than hold its weight. With n tiles and s stages there are
n + s - 1 beats: the pipeline fills and drains. Weights that do not fit on the chip are laid out part by part, and the
smallest tensor that streams is read again for each part.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from sambasim.costs.load import Load
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
    on top of the longer of them. `again_bytes` is the traffic of weights that do not fit."""

    compute_s: float
    memory_s: float
    fill_s: float
    launch_s: float
    again_bytes: int

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
        return Bound.CAPACITY if self.again_bytes else Bound.MEMORY


def chip_bytes(load: Load, budget: Budget) -> int:
    """What a section wants on the chip: its weights, and two tiles of each tensor that passes from stage to stage."""
    return load.resident_bytes + 2 * load.buffered_row_bytes * min(budget.tile_rows, load.rows)


def price_of(load: Load, budget: Budget) -> SectionPrice:
    """What `load` is predicted to take as one section."""
    again_bytes = 0
    if load.resident_bytes > budget.chip_bytes:
        again_bytes = (ceil(load.resident_bytes / budget.chip_bytes) - 1) * load.streamed_bytes
    memory_s = (load.traffic_bytes + again_bytes) / budget.memory_bytes_per_s
    shared_s = load.product_flops / (budget.units * budget.unit_flops_per_s)
    alone_s = (p.flops / (min(p.units, budget.units) * budget.unit_flops_per_s) for p in load.products)
    compute_s = max(shared_s, *alone_s, 0.0)
    tiles = max(1.0, load.rows / budget.tile_rows)
    fill_s = max(compute_s, memory_s) * (load.stages - 1) / tiles
    return SectionPrice(compute_s, memory_s, fill_s, budget.launch_s, again_bytes)
