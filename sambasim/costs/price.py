"""The predicted seconds of a section, and what limits it. A section is a pipeline: tensors stream through its stages in
tiles, one stage a beat, while weights and their gradients stay on the chip; n tiles and s stages take n + s - 1 beats.
If the weights exceed the chip, the smallest streamed tensor is read again for each part."""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import NamedTuple

from sambasim.costs.work import Read, Stage, Tensor, Work
from sambasim.hardware.budget import Budget


class Product(NamedTuple):
    flops: int
    units: float


@dataclass(frozen=True, slots=True)
class Load:
    """What one section transfers, stores and computes. `once_bytes` is the traffic that does not stream (weights and
    their gradients), `least_streamed_bytes` that of the smallest streamed tensor, `buffered_bytes` one tile of each
    tensor between stages, `rows` that of the tensor with the most."""

    read_bytes: int
    written_bytes: int
    once_bytes: int
    least_streamed_bytes: int
    resident_bytes: int
    buffered_bytes: int
    rows: int
    stages: int
    products: tuple[Product, ...]

    @property
    def traffic_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def product_flops(self) -> int:
        return sum(product.flops for product in self.products)


class Bound(StrEnum):
    COMPUTE = "compute"
    MEMORY = "memory"
    CAPACITY = "capacity"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class SectionPrice:
    """Predicted seconds of one section. `compute_s` and `memory_s` overlap; `fill_s` and `launch_s` are added to the
    longer of them. `again_s` is the part of `memory_s` for rereading, because the weights exceed the chip; `launch_s`
    includes the load of the program as far as the section is too short to hide it."""

    compute_s: float
    memory_s: float
    fill_s: float
    launch_s: float
    again_s: float

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


def tile_rows(rows: int, budget: Budget) -> int:
    return max(1, min(budget.tile_rows, -(-rows // budget.least_tiles)))


def chip_bytes(load: Load) -> int:
    """Bytes on the chip: resident tensors, and two tiles of each tensor that passes from stage to stage."""
    return load.resident_bytes + 2 * load.buffered_bytes


def price_of(load: Load, budget: Budget) -> SectionPrice:
    parts = max(1, ceil(load.resident_bytes / budget.chip_bytes))
    again_s = (parts - 1) * load.least_streamed_bytes / budget.memory_bytes_per_s
    memory_s = load.traffic_bytes / budget.memory_bytes_per_s + again_s
    shared_s = load.product_flops / (budget.units * budget.unit_flops_per_s)
    alone_s = (p.flops / (min(p.units, budget.units) * budget.unit_flops_per_s) for p in load.products)
    compute_s = max(shared_s, *alone_s, 0.0)
    streaming_s = memory_s - load.once_bytes / budget.memory_bytes_per_s
    beats = max(1.0, load.rows / tile_rows(load.rows, budget))
    fill_s = max(compute_s, streaming_s) * (load.stages - 1) / beats
    exposed_s = max(0.0, budget.load_s - max(compute_s, memory_s) - fill_s)
    return SectionPrice(compute_s, memory_s, fill_s, budget.launch_s + exposed_s, again_s)


def load_of(work: Work, start: int, stop: int, budget: Budget) -> Load:
    growing = GrowingLoad(work, start, budget)
    for _ in range(start, stop):
        growing.take()
    return growing.load()


class GrowingLoad:
    """The load of a section that begins at stage `start` of `work` and grows by one stage at a time."""

    def __init__(self, work: Work, start: int, budget: Budget) -> None:
        self._work, self._budget = work, budget
        self._next = start
        self._made: dict[str, None] = {}
        self._views: set[str] = set()
        self._parts: dict[str, float] = {}
        self._buffered: set[str] = set()
        self._read_bytes = self._once_bytes = self._resident_bytes = self._buffered_bytes = 0
        self._least_streamed_bytes: int | None = None
        self._rows = 1
        self._products: list[Product] = []
        self._stages = 0

    def can_take(self, stage: Stage) -> bool:
        """False if `stage` needs all rows of a tensor that the section computes row by row."""
        return not (stage.needs_all and any(read.value in self._made for read in stage.reads))

    def take(self) -> None:
        tensors, stage = self._work.tensors, self._work.stages[self._next]
        for read in stage.reads:
            if read.value in self._made:
                tensor = tensors[read.value]
                if read.value not in self._buffered and not tensor.resident:
                    self._buffered_bytes += tensor.row_bytes * tile_rows(tensor.rows, self._budget)
                self._buffered.add(read.value)
            elif read.view not in self._views:
                self._read(read, tensors[read.value])
        for value in stage.writes:
            self._made[value] = None
            if tensors[value].resident:
                self._resident_bytes += tensors[value].size_bytes
        streamed = (tensors[value].rows for value in stage.values if not tensors[value].resident)
        self._rows = max(self._rows, *streamed, 1)
        if stage.product_flops:
            self._products.append(Product(stage.product_flops, stage.units))
        self._next += 1
        self._stages += 1

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
        work, last = self._work, self._work.last_reader
        written = [
            work.tensors[value] for value in self._made if value in work.kept or last.get(value, -1) >= self._next
        ]
        return Load(
            read_bytes=self._read_bytes,
            written_bytes=sum(tensor.size_bytes for tensor in written),
            once_bytes=self._once_bytes + sum(tensor.size_bytes for tensor in written if tensor.resident),
            least_streamed_bytes=self._least_streamed_bytes or 0,
            resident_bytes=self._resident_bytes,
            buffered_bytes=self._buffered_bytes,
            rows=self._rows,
            stages=self._stages,
            products=tuple(self._products),
        )
