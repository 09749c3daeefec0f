"""Whether a program fits on a device: what it keeps and its boundary tensors in off-chip memory, and each operator on
the chip. A boundary tensor lives from the section that writes it to the last one that reads it."""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from sambasim.costs.work import Work
from sambasim.errors import MachineError
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Graph
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.units import format_bytes

_ALIGNMENT_BYTES = 64
_WHOLE_ROWS = (OperatorKind.SOFTMAX, OperatorKind.LOSS, OperatorKind.NORMALIZATION, OperatorKind.SCAN)
"""Operators that read a whole row before they write any of it; others work on parts of rows."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary tensor. `first` is the number of the section that writes it, `last` of the last one that reads it."""

    value: str
    size_bytes: int
    address: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Residency:
    """All boundary tensors of so many `sections`, in the order in which they are written."""

    boundaries: tuple[Boundary, ...]
    sections: int

    @property
    def size_bytes(self) -> int:
        return max((boundary.address + boundary.size_bytes for boundary in self.boundaries), default=0)

    def taken_bytes(self, runs: Iterable[tuple[int, int]] | None = None) -> list[int]:
        """The bytes in use while each section runs: all in order, or `runs` of them, some for one pass and some for
        others."""
        written, freed = [0] * self.sections, [0] * self.sections
        for boundary in self.boundaries:
            written[boundary.first] += boundary.size_bytes
            freed[boundary.last] += boundary.size_bytes
        used, taken = 0, []
        for number in chain.from_iterable(range(*run) for run in runs or [(0, self.sections)]):
            used += written[number]
            taken.append(used)
            used -= freed[number]
        return taken


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, by part."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    activations: int = 0
    temporaries: int = 0
    buffers: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())

    @property
    def sizes(self) -> dict[str, int]:
        """By the names that all output has for them."""
        return {"memory_bytes": self.total_bytes, **{f"{part}_bytes": size for part, size in asdict(self).items()}}


@dataclass(frozen=True, slots=True)
class Need:
    """Off-chip bytes of one rank; `activations` are boundary tensors of all passes that have begun."""

    memory: Memory
    residency: Residency

    @property
    def size_bytes(self) -> int:
        return self.memory.total_bytes

    @property
    def between_bytes(self) -> int:
        return self.memory.activations

    @property
    def kept_bytes(self) -> int:
        return self.size_bytes - self.between_bytes


def reside(work: Work, sections: Sequence[tuple[int, int]], excluded: frozenset[str] = frozenset()) -> Residency:
    """Without `excluded`. What another stage of a pipeline sends is there from the first section that reads it."""
    section_of = [number for number, (start, stop) in enumerate(sections) for _ in range(start, stop)]
    ending: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    used: list[tuple[int, int]] = []
    boundaries: list[Boundary] = []
    known: set[str] = set()
    for number, (start, stop) in enumerate(sections):
        for stage in work.stages[start:stop]:
            received = [read.value for read in stage.reads if read.value in work.received and read.value not in known]
            known.update(received)
            for value in (*received, *stage.writes):
                last = len(sections) - 1 if value in work.kept else section_of[work.last_reader.get(value, start)]
                if value in excluded or (last <= number and value not in work.kept):
                    continue
                size_bytes = -(-work.tensors[value].size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                address = _first_free(used, size_bytes)
                boundaries.append(Boundary(value, size_bytes, address, number, last))
                ending[last].append((address, address + size_bytes))
                insort(used, (address, address + size_bytes))
        for span in ending.pop(number, []):
            used.remove(span)
    return Residency(tuple(boundaries), len(sections))


def _first_free(used: Sequence[tuple[int, int]], size_bytes: int) -> int:
    """The lowest address with so many free bytes between the `used` ranges, which are in order."""
    free = 0
    for start, stop in used:
        if start - free >= size_bytes:
            break
        free = stop
    return free


def check_memory(graph: Graph, need: Need, budget: Budget) -> None:
    if need.size_bytes <= budget.capacity_bytes:
        return
    residency, where = need.residency, None
    has = f"{budget.where} has {format_bytes(budget.capacity_bytes)}"
    kept, between = format_bytes(need.kept_bytes), format_bytes(need.between_bytes)
    parts = f"{kept} is for what the program keeps, {between} for tensors between sections"
    what = f"one replica needs {format_bytes(need.size_bytes)} of {budget.off_chip}, and {has}: {parts}"
    if residency.boundaries:
        taken = residency.taken_bytes()
        fullest = taken.index(max(taken))
        live = (boundary for boundary in residency.boundaries if boundary.first <= fullest <= boundary.last)
        largest = max(live, key=lambda boundary: boundary.size_bytes)
        node = next(node for node in graph.nodes if largest.value in node.results)
        where = str(node.source or node.name)
        what += f"; the largest of them, {format_bytes(largest.size_bytes)}, is the result of {node.operator}"
    raise MachineError(what, where=where, remedy=_remedy(budget))


def check_chip(graph: Graph, work: Work, budget: Budget) -> None:
    """Raises MachineError if two rows, which buffers hold, exceed the chip for an operator that needs whole rows."""
    for stage in work.stages:
        node = graph.nodes[stage.node]
        if OPERATORS[node.operator].kind not in _WHOLE_ROWS:
            continue
        tensors = (work.tensors[value] for value in set(stage.values))
        needed = 2 * sum(tensor.row_bytes for tensor in tensors if not tensor.resident)
        if needed > budget.chip_bytes:
            rows = f"two rows of what {node.operator} reads and writes take {format_bytes(needed)}"
            chip = f"a section on {budget.where} has {format_bytes(budget.chip_bytes)}"
            what = f"{rows} of memory on the chip, and {chip}"
            raise MachineError(what, where=str(node.source or node.name), remedy=_remedy(budget))


def _remedy(budget: Budget) -> str:
    more = "a larger --num-tiles, " if " of " in budget.where else ""
    return f"give {more}a smaller model or batch, or another --arch"
