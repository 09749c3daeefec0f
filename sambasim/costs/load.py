"""What neighbouring stages ask of a device when they share a section.

What a stage hands to a later one of its section stays on the chip: it is no traffic, and takes a buffer for some rows
of it. What comes from before the section, or is read after it, goes through the memory beside the chip, once.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sambasim.costs.work import Stage, Work


class Product(NamedTuple):
    """Floating-point operations, and the compute units that can share them."""

    flops: int
    units: int


@dataclass(frozen=True, slots=True)
class Load:
    """What one section asks for.

    read_bytes, written_bytes: traffic with the memory beside the chip
    streamed_bytes: of the smallest streamed tensor that is read
    resident_bytes: of what stays on the chip while samples stream past: weights
    buffered_row_bytes: one row of each tensor that passes from stage to stage
    rows: of the tensor that has the most
    stages: operators
    products: those that multiply matrices
    """

    read_bytes: int
    written_bytes: int
    streamed_bytes: int
    resident_bytes: int
    buffered_row_bytes: int
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


class GrowingLoad:
    """The load of stages that are added one after another, from stage `start` of `work` on."""

    def __init__(self, work: Work, start: int) -> None:
        self._work = work
        self._next = start
        self._made: dict[str, None] = {}
        self._read: dict[str, None] = {}
        self._handed_on: set[str] = set()
        self._read_bytes = self._resident_bytes = self._buffered_row_bytes = 0
        self._streamed_bytes: int | None = None
        self._rows = 1
        self._products: list[Product] = []
        self._stages = 0

    def can_take(self, stage: Stage) -> bool:
        """Whether `stage` may share the section: one that needs all of its input first cannot be given it row by
        row."""
        return not (stage.needs_all and any(value in self._made for value in stage.reads))

    def take(self) -> None:
        """Add the next stage."""
        tensors, stage = self._work.tensors, self._work.stages[self._next]
        for value in stage.reads:
            tensor = tensors[value]
            if value in self._made:
                if value not in self._handed_on and not tensor.resident:
                    self._buffered_row_bytes += tensor.row_bytes
                self._handed_on.add(value)
            elif value not in self._read:
                self._read[value] = None
                self._read_bytes += tensor.size_bytes
                if tensor.resident:
                    self._resident_bytes += tensor.size_bytes
                else:
                    least = self._streamed_bytes
                    self._streamed_bytes = tensor.size_bytes if least is None else min(least, tensor.size_bytes)
        self._made.update(dict.fromkeys(stage.writes))
        streamed = (tensors[value].rows for value in (*stage.reads, *stage.writes) if not tensors[value].resident)
        self._rows = max(self._rows, *streamed, 1)
        if stage.product_flops:
            self._products.append(Product(stage.product_flops, stage.units))
        self._next += 1
        self._stages += 1

    def load(self) -> Load:
        """Of the stages so far."""
        work, last = self._work, self._work.last_reader
        written = sum(
            work.tensors[value].size_bytes
            for value in self._made
            if value in work.kept or last.get(value, -1) >= self._next
        )
        return Load(
            self._read_bytes, written, self._streamed_bytes or 0, self._resident_bytes, self._buffered_row_bytes,
            self._rows, self._stages, tuple(self._products),
        )  # fmt: skip


def load_of(work: Work, start: int, stop: int) -> Load:
    """What stages `start` up to `stop` of `work` ask for as one section."""
    growing = GrowingLoad(work, start)
    for _ in range(start, stop):
        growing.take()
    return growing.load()
