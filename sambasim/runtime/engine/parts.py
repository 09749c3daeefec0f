"""The instructions of a pass, in the parts after which something can be told to be done."""

from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.runtime.instructions import Instruction


@dataclass(frozen=True, slots=True)
class Part:
    """Some instructions; when they have run, the first `sections` sections of the pass have."""

    sections: int
    instructions: tuple[Instruction, ...]


def by_part(instructions: Sequence[Instruction | None], sizes: Sequence[tuple[int, int]]) -> list[Part]:
    """The instructions in parts. `sizes` gives for each how many sections it is, and the number of its instructions,
    those included that are left out: None."""
    parts: list[Part] = []
    start = done = 0
    for sections, size in sizes:
        done += sections
        parts.append(Part(done, tuple(one for one in instructions[start : start + size] if one is not None)))
        start += size
    return parts
