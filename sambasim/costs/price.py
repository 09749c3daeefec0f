"""What a section transfers and holds, the compute units that its operators need, and its predicted seconds.

A section is a pipeline: tensors stream through its stages in tiles, one stage a beat, while weights and their gradients
stay on the chip; n tiles and s stages take n + s - 1 beats, and there are at least as many tiles as stages. If the
weights exceed the chip, the smallest streamed tensor is read again for each part."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace
from math import ceil, inf
from typing import NamedTuple

from sambasim.costs.work import Read, Stage, Tensor, Work
from sambasim.hardware.budget import Budget

TILE_UNITS = 160  # compute units of a tile of an SN10 or SN30; where tiles are not published, the same is assumed


class Product(NamedTuple):
    """Its seconds on one compute unit, an nth on n units; the fewest units that it needs, the most that it can use."""

    flops: int
    unit_s: float
    least: int
    most: float = inf


@dataclass(frozen=True, slots=True)
class Load:
    """What one section transfers, stores and computes. `once_bytes`: traffic that does not stream (weights and their
    gradients); `least_streamed_bytes`: of the smallest streamed tensor; `buffered_bytes`: a tile of each tensor between
    stages; `rows`: of the tensor with the most; `other_units`: of operators without a product."""

    read_bytes: int
    written_bytes: int
    once_bytes: int
    least_streamed_bytes: int
    resident_bytes: int
    buffered_bytes: int
    rows: int
    stages: int
    products: tuple[Product, ...]
    other_units: int = 0

    @property
    def least_units(self) -> int:
        return self.other_units + sum(product.least for product in self.products)

    @property
    def traffic_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def product_flops(self) -> int:
        return sum(product.flops for product in self.products)


def unit_seconds(stage: Stage, budget: Budget) -> float:
    """Of its product, on one compute unit."""
    return stage.product_flops / (budget.unit_flops_per_s if stage.blocks == inf else budget.convolution_flops_per_s)


def alone_s(stage: Stage, work: Work, budget: Budget) -> float:
    """Predicted seconds of an operator by itself on all units, without the start of a section."""
    moved_bytes = sum(work.tensors[value].size_bytes for value in stage.values)
    return unit_seconds(stage, budget) / budget.placeable_units + moved_bytes / budget.memory_bytes_per_s


def least_units(stage: Stage, budget: Budget) -> int:
    """By hand one, by the compiler as many as hold a row of what the operator writes, at most a tile's."""
    return 1 if budget.by_hand else min(TILE_UNITS, ceil(stage.columns / budget.columns_per_unit))


def chip_bytes(load: Load, budget: Budget) -> float:
    """Resident tensors, and two tiles of each that passes from stage to stage, down to an eighth if space is short."""
    buffers = 2 * load.buffered_bytes
    return load.resident_bytes + min(buffers, max(budget.chip_bytes - load.resident_bytes, buffers / 8))


def load_of(work: Work, start: int, stop: int, budget: Budget) -> Load:
    growing = GrowingLoad(work, start, budget)
    for _ in range(start, stop):
        growing.take()
    return growing.load()


class GrowingLoad:
    """The load of a section that begins at stage `start` of `work` and grows by one stage at a time."""

    def __init__(self, work: Work, start: int, budget: Budget) -> None:
        self._work, self._budget, self._next = work, budget, start
        self._made: set[str] = set()
        self._views: set[str] = set()
        self._parts: dict[str, float] = {}
        self._buffered: set[str] = set()
        self._read_bytes = self._once_bytes = self._resident_bytes = self._buffered_bytes = self._written_bytes = 0
        self._least_streamed_bytes: int | None = None
        self._rows = 1
        self._products: list[Product] = []
        self.stages = self._least_units = self._other_units = 0

    def can_take(self, stage: Stage) -> bool:
        """False if there are too few units, or if `stage` needs all rows of a tensor that is computed row by row."""
        if self._least_units + least_units(stage, self._budget) > self._budget.placeable_units:
            return False
        return not (stage.needs_all and any(read.value in self._made for read in stage.reads))

    def take(self) -> None:
        tensors, stage, budget = self._work.tensors, self._work.stages[self._next], self._budget
        for read in stage.reads:
            if read.value in self._made:
                tensor = tensors[read.value]
                if read.value not in self._buffered and not tensor.resident:
                    self._buffered_bytes += tensor.row_bytes * min(tensor.rows, budget.tile_rows)
                self._buffered.add(read.value)
            elif read.view not in self._views:
                self._read(read, tensors[read.value])
        for value in stage.writes:
            self._made.add(value)
            if value in self._work.kept or value in self._work.last_reader:
                self._write(tensors[value], 1)
            if tensors[value].resident:
                self._resident_bytes += tensors[value].size_bytes
        for value in {read.value for read in stage.reads}:
            if value in self._made and self._work.last_reader[value] == self._next and value not in self._work.kept:
                self._write(tensors[value], -1)
        for value in stage.values:
            tensor = tensors[value]
            if tensor.rows > self._rows and not tensor.resident:
                self._rows = tensor.rows
        least = least_units(stage, budget)
        if stage.product_flops:
            most = max(least, stage.blocks * max(1.0, budget.units / TILE_UNITS))
            self._products.append(Product(stage.product_flops, unit_seconds(stage, budget), least, most))
        else:
            self._other_units += least
        self._least_units += least
        self._next += 1
        self.stages += 1

    def _write(self, tensor: Tensor, times: int) -> None:
        self._written_bytes += times * tensor.size_bytes
        if tensor.resident:
            self._once_bytes += times * tensor.size_bytes

    def _read(self, read: Read, tensor: Tensor) -> None:
        """Each new view of a value adds its share of the bytes, up to the whole value."""
        self._views.add(read.view)
        before = self._parts.get(read.value, 0.0)
        part = self._parts[read.value] = min(1.0, before + read.part)
        read_bytes = int(tensor.size_bytes * (part - before))
        self._read_bytes += read_bytes
        if tensor.resident:
            self._resident_bytes += read_bytes
            self._once_bytes += read_bytes
        elif read_bytes:
            least = self._least_streamed_bytes
            self._least_streamed_bytes = read_bytes if least is None else min(least, read_bytes)

    def load(self) -> Load:
        traffic_bytes = (self._read_bytes, self._written_bytes, self._once_bytes, self._least_streamed_bytes or 0)
        on_chip = (self._resident_bytes, self._buffered_bytes, self._rows, self.stages)
        return Load(*traffic_bytes, *on_chip, tuple(self._products), self._other_units)


class Bound(StrEnum):
    COMPUTE = "compute"
    MEMORY = "memory"
    CAPACITY = "capacity"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class SectionPrice:
    """Predicted seconds of one section: `fill_s` and `launch_s` are added to the longer of `compute_s` and `memory_s`.
    `again_s`: of `memory_s`, for rereading, because weights exceed the chip; `launch_s` includes what the section is
    too short to hide of its program's load. `units`: on which operators are placed."""

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
    """The seconds of the slowest product and the units in use; it gets free ones until it is as fast as memory."""
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
    placed = [p.least * max(1, ceil(min(p.unit_s / surely_s, p.most) / p.least)) for p in products]
    free += sum(product.least for product in products) - sum(placed)

    def entry(number: int) -> tuple[float, int]:
        return -products[number].unit_s / min(placed[number], products[number].most), number

    slowest = [entry(number) for number in range(len(products))]
    if -min(slowest)[0] <= memory_s:
        return -min(slowest)[0], there - free
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


def _balanced(products: Sequence[Product], free: int, memory_s: float, placed: int) -> tuple[float, float]:
    def more(seconds: float) -> float:
        return sum(max(0.0, product.unit_s / seconds - product.least) for product in products)

    low = max(product.unit_s / product.most for product in products)
    high = max(low, *(product.unit_s / product.least for product in products))
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if more(middle) > free else (low, middle)
    return high, placed + more(max(high, memory_s))
