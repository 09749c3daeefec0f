"""What neighbouring stages ask of a device when they share a section.

What a stage hands to a later one of its section stays on the chip: it is no traffic, and takes a buffer for some rows
of it. What comes from before the section, or is read after it, goes through the memory beside the chip, once. Weights
stay on the chip while samples stream past, and so do their gradients, to which each sample adds.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sambasim.costs.work import Read, Stage, Tensor, Work
from sambasim.hardware.budget import Budget


class Product(NamedTuple):
    """Floating-point operations, and the compute units that can share them."""

    flops: int
    units: float


@dataclass(frozen=True, slots=True)
class Load:
    """What one section asks for.

    read_bytes, written_bytes: traffic with the memory beside the chip
    once_bytes: the part of the traffic that does not stream: weights that come, and gradients that go
    streamed_bytes: of the smallest streamed tensor that is read
    resident_bytes: of what stays on the chip while samples stream past: weights, and sums of gradients
    buffered_bytes: one tile of each tensor that passes from stage to stage
    rows: of the tensor that has the most
    stages: operators
    products: those that multiply matrices
    """

    read_bytes: int
    written_bytes: int
    once_bytes: int
    streamed_bytes: int
    resident_bytes: int
    buffered_bytes: int
    rows: int
    stages: int
    products: tuple[Product, ...]

    @property
    def traffic_bytes(self) -> int:
        """Both directions."""
        return self.read_bytes + self.written_bytes

    @property
    def product_flops(self) -> int:
        """Of all products together."""
        return sum(product.flops for product in self.products)


def tile_rows(rows: int, budget: Budget) -> int:
    """Rows of a tensor of `rows` that move at a time."""
    return max(1, min(budget.tile_rows, -(-rows // budget.least_tiles)))


class GrowingLoad:
    """The load of stages that are added one after another, from stage `start` of `work` on."""

    def __init__(self, work: Work, start: int, budget: Budget) -> None:
        self._work, self._budget = work, budget
        self._next = start
        self._made: dict[str, None] = {}
        self._views: set[str] = set()
        self._parts: dict[str, float] = {}
        self._handed_on: set[str] = set()
        self._read_bytes = self._once_bytes = self._resident_bytes = self._buffered_bytes = 0
        self._streamed_bytes: int | None = None
        self._rows = 1
        self._products: list[Product] = []
        self._stages = 0

    def can_take(self, stage: Stage) -> bool:
        """Whether `stage` may share the section: one that needs all of its input first cannot be given it row by
        row."""
        return not (stage.needs_all and any(read.value in self._made for read in stage.reads))

    def take(self) -> None:
        """Add the next stage."""
        tensors, stage = self._work.tensors, self._work.stages[self._next]
        for read in stage.reads:
            if read.value in self._made:
                self._hand_on(read.value, tensors[read.value])
            elif read.view not in self._views:
                self._read(read, tensors[read.value])
        for value in stage.writes:
            self._made[value] = None
            if tensors[value].resident:
                self._resident_bytes += tensors[value].size_bytes
        values = (*(read.value for read in stage.reads), *stage.writes)
        self._rows = max(self._rows, *(tensors[value].rows for value in values if not tensors[value].resident), 1)
        if stage.product_flops:
            self._products.append(Product(stage.product_flops, stage.units))
        self._next += 1
        self._stages += 1

    def _hand_on(self, value: str, tensor: Tensor) -> None:
        if value not in self._handed_on and not tensor.resident:
            self._buffered_bytes += tensor.row_bytes * tile_rows(tensor.rows, self._budget)
        self._handed_on.add(value)

    def _read(self, read: Read, tensor: Tensor) -> None:
        """Views of one value are taken for different parts of it, as long as there are such."""
        self._views.add(read.view)
        before = self._parts.get(read.value, 0.0)
        part = self._parts[read.value] = min(1.0, before + read.part)
        read_bytes = int(tensor.size_bytes * (part - before))
        self._read_bytes += read_bytes
        if tensor.resident:
            self._resident_bytes += read_bytes
            self._once_bytes += read_bytes
        elif read_bytes:
            least = self._streamed_bytes
            self._streamed_bytes = read_bytes if least is None else min(least, read_bytes)

    def load(self) -> Load:
        """Of the stages so far."""
        work, last = self._work, self._work.last_reader
        written = [
            work.tensors[value] for value in self._made if value in work.kept or last.get(value, -1) >= self._next
        ]
        return Load(
            read_bytes=self._read_bytes,
            written_bytes=sum(tensor.size_bytes for tensor in written),
            once_bytes=self._once_bytes + sum(tensor.size_bytes for tensor in written if tensor.resident),
            streamed_bytes=self._streamed_bytes or 0,
            resident_bytes=self._resident_bytes,
            buffered_bytes=self._buffered_bytes,
            rows=self._rows,
            stages=self._stages,
            products=tuple(self._products),
        )


def load_of(work: Work, start: int, stop: int, budget: Budget) -> Load:
    """What stages `start` up to `stop` of `work` ask for as one section on `budget`."""
    growing = GrowingLoad(work, start, budget)
    for _ in range(start, stop):
        growing.take()
    return growing.load()
