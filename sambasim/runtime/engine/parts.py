"""The instructions of a pass, in parts: after each, sections have ended, or a communication takes place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from sambasim.runtime.instructions import Instruction


@dataclass(frozen=True, slots=True)
class Part:
    """Some instructions; when they have run, the first `sections` sections of the graph have. A communication is a part
    by itself."""

    sections: int
    instructions: tuple[Instruction, ...]


def by_part(instructions: Sequence[Instruction | None], sizes: Sequence[tuple[int, int]]) -> list[Part]:
    """The instructions in parts. `sizes` gives, for each unit, how many sections it is and how many instructions it
    has, counting those that are left out: None."""
    parts: list[Part] = []
    start = done = 0
    for sections, size in sizes:
        kept = [one for one in instructions[start : start + size] if one is not None]
        *first, last = list(_apart(kept)) or [()]
        parts += [Part(done, one) for one in first]
        done += sections
        parts.append(Part(done, last))
        start += size
    return parts


def _apart(instructions: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """Runs of instructions between communications, and each communication."""
    for communicates, run in groupby(instructions, key=lambda one: one.communication is not None):
        if communicates:
            yield from ((one,) for one in run)
        else:
            yield tuple(run)
