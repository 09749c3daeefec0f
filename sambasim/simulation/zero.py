"""ZeRO 2 and 3 in a predicted step: what replicas that sync by host move between the sections of a pass.

The nodes are those of `ir/zero.py`, which a run executes: behind a section of the last pass of a step groups are
reduced, and with ZeRO 3 before a section of each pass gathered, but not after the update. RDUs that read each other's
memory do neither: their sync is that of ZeRO 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sambasim.ir.dataflow import groups_of, pass_and_update
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.zero import in_slices

GATHERS_IN_PASSES = 3
"""The level of ZeRO at which parameters are gathered in passes, and not after the update."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Groups that are gathered before a section of a pass, and those that are reduced behind it in the last pass."""

    gathered: tuple[str, ...]
    reduced: tuple[str, ...]


def zero_of(program: Program) -> int:
    """The level of ZeRO, by default that of `compile --data-parallel`."""
    return 1 if program.data_parallel is None else program.data_parallel.zero


def moves_in_passes(program: Program) -> list[Moves]:
    """By section of a pass."""
    training = in_slices(program).training
    if training is None:
        return []

    def moved(section: Section, operator: str) -> tuple[str, ...]:
        nodes = (node for node in training.section_nodes(section) if node.operator == operator)
        return tuple(name for node in nodes for name in groups_of(node))

    sections, _ = pass_and_update(training)
    return [Moves(moved(one, "comm.all_gather"), moved(one, "comm.reduce_scatter")) for one in sections]


def cut_as(program: Program, cut: Sequence[tuple[SectionKind, str, tuple[int, int]]]) -> Program:
    """`program`, whose passes have these sections: kind, name and range of nodes."""
    training = program.training
    if training is None:
        return program
    sections = [Section(number, kind, name, *nodes) for number, (kind, name, nodes) in enumerate(cut)]
    _, update = pass_and_update(training)
    return replace(program, training=replace(training, sections=(*sections, *update)))
