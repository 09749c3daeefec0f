"""The predicted seconds of a section, and what limits it. A section is a pipeline: tensors stream through its stages in
tiles, one stage a beat, while weights and their gradients stay on the chip; n tiles and s stages take n + s - 1 beats,
and there are at least as many tiles as stages.
If the weights exceed the chip, the smallest streamed tensor is read again for each part."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace
from math import ceil

from sambasim.costs.load import Load, Product
from sambasim.hardware.budget import Budget


class Bound(StrEnum):
    COMPUTE = "compute"
    MEMORY = "memory"
    CAPACITY = "capacity"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class SectionPrice:
    """Predicted seconds of one section. `compute_s` and `memory_s` overlap; `fill_s` and `launch_s` are added to the
    longer of them. `again_s` is the part of `memory_s` for rereading, because the weights exceed the chip; `launch_s`
    includes the load of the program as far as the section is too short to hide it. `units` are the compute units on
    which operators are placed."""

    compute_s: float
    memory_s: float
    fill_s: float
    launch_s: float
    again_s: float
    units: float

    @property
    def predicted_s(self) -> float:
        return max(self.compute_s, self.memory_s) + self.fill_s + self.launch_s

    @property
    def bound(self) -> Bound:
        if self.launch_s > max(self.compute_s, self.memory_s) + self.fill_s:
            return Bound.LAUNCH
        if self.compute_s > self.memory_s:
            return Bound.COMPUTE
        return Bound.CAPACITY if self.again_s > self.memory_s / 2 else Bound.MEMORY


def price_of(load: Load, budget: Budget) -> SectionPrice:
    parts = max(1, ceil(load.resident_bytes / budget.chip_bytes))
    again_s = (parts - 1) * load.least_streamed_bytes / budget.memory_bytes_per_s
    memory_s = load.traffic_bytes / budget.memory_bytes_per_s + again_s
    compute_s, units = _placed(load, budget, memory_s)
    streaming_s = memory_s - load.once_bytes / budget.memory_bytes_per_s
    beats = max(load.rows / budget.tile_rows, min(load.rows, load.stages))
    fill_s = max(compute_s, streaming_s) * (load.stages - 1) / beats
    exposed_s = max(0.0, budget.load_s - max(compute_s, memory_s) - fill_s)
    return SectionPrice(compute_s, memory_s, fill_s, budget.launch_s + exposed_s, again_s, units)


def _placed(load: Load, budget: Budget, memory_s: float) -> tuple[float, float]:
    """The seconds of the slowest product, and the units in use. Units that are free go to the slowest product until it
    is as fast as memory: by hand in any number, by the compiler as one more copy of the product at a time."""
    needed, there = load.least_units, budget.placeable_units
    if not load.products:
        return 0.0, min(needed, there)
    if needed >= there:  # one wide operator, or a section that was cut for more units
        return max(product.unit_s / product.least for product in load.products) * needed / there, there
    free = there - needed
    if budget.by_hand:
        return _balanced(load.products, free, memory_s, needed)
    return _copied(load.products, free, memory_s, there)


def _copied(products: Sequence[Product], free: int, memory_s: float, there: int) -> tuple[float, float]:
    # All products reach this time, each with at most one copy more than its share of the free units.
    spread_s = sum(product.unit_s for product in products) / free
    surely_s = max(memory_s, spread_s, *(product.unit_s / product.most for product in products))
    placed = [
        product.least * max(1, ceil(min(product.unit_s / surely_s, product.most) / product.least))
        for product in products
    ]
    free += sum(product.least for product in products) - sum(placed)

    def entry(number: int) -> tuple[float, int]:
        return -products[number].unit_s / min(placed[number], products[number].most), number

    slowest = [entry(number) for number in range(len(products))]
    heapify(slowest)
    while -slowest[0][0] > memory_s:
        number = slowest[0][1]
        product = products[number]
        if product.least > free or placed[number] >= product.most:
            break
        free -= product.least
        placed[number] += product.least
        heapreplace(slowest, entry(number))
    return -slowest[0][0], there - free


_HALVINGS = 30


def _balanced(products: Sequence[Product], free: int, memory_s: float, placed: int) -> tuple[float, float]:
    def more(seconds: float) -> float:
        return sum(max(0.0, product.unit_s / seconds - product.least) for product in products)

    low = max(product.unit_s / product.most for product in products)
    high = max(low, *(product.unit_s / product.least for product in products))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if more(middle) > free else (low, middle)
    return high, placed + more(max(high, memory_s))
