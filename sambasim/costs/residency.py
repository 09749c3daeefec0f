"""What lies in the memory beside the chip while a step runs: tensors that one section hands to a later one.

Each has a lifetime, from the section that makes it to the last that reads it, and an address: the lowest at which it
fits when it is made. What the program keeps (parameters, gradients, states) has its home elsewhere, and is not here.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.costs.work import Work

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor between sections: `first` and `last` are the numbers of those that make it and read it last."""

    value: str
    size_bytes: int
    address: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Residency:
    """All of them in the order in which they are made, and the bytes that are taken while each section runs."""

    boundaries: tuple[Boundary, ...]
    taken_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """From the lowest address to the highest."""
        return max((one.address + one.size_bytes for one in self.boundaries), default=0)

    @property
    def fullest(self) -> int:
        """The number of the section during which most is taken."""
        return self.taken_bytes.index(max(self.taken_bytes)) if self.taken_bytes else 0


def reside(work: Work, sections: Sequence[tuple[int, int]], homes: frozenset[str] = frozenset()) -> Residency:
    """What `sections`, as ranges of stages of `work`, hand on. Values in `homes` are not counted; other values that
    outlive the graph stay to its end."""
    section_of = [number for number, (start, stop) in enumerate(sections) for _ in range(start, stop)]
    leaving: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    gaps = _Gaps()
    boundaries: list[Boundary] = []
    taken, taken_bytes = 0, []
    for number, (start, stop) in enumerate(sections):
        for stage in work.stages[start:stop]:
            for value in stage.writes:
                last = len(sections) - 1 if value in work.kept else section_of[work.last_reader.get(value, start)]
                if value in homes or (last <= number and value not in work.kept):
                    continue
                size_bytes = -(-work.tensors[value].size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                address = gaps.take(size_bytes)
                boundaries.append(Boundary(value, size_bytes, address, number, last))
                leaving[last].append((address, size_bytes))
                taken += size_bytes
        taken_bytes.append(taken)
        for address, size_bytes in leaving.pop(number, []):
            gaps.give(address, size_bytes)
            taken -= size_bytes
    return Residency(tuple(boundaries), tuple(taken_bytes))


class _Gaps:
    """Free ranges of addresses, ascending, none next to another; the last has no end."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, float]] = [(0, float("inf"))]

    def take(self, size_bytes: int) -> int:
        """The lowest address with that much room."""
        index = next(i for i, (start, stop) in enumerate(self._gaps) if stop - start >= size_bytes)
        start, stop = self._gaps[index]
        self._gaps[index : index + 1] = [(start + size_bytes, stop)] if stop - start > size_bytes else []
        return start

    def give(self, address: int, size_bytes: int) -> None:
        """Free it again."""
        if not size_bytes:
            return
        insort(self._gaps, (address, address + size_bytes))
        joined: list[tuple[int, float]] = []
        for start, stop in self._gaps:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self._gaps = joined
