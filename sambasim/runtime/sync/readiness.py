"""When a group's gradients may be reduced, and when its parameters may be updated, told from the graph.

Gradients are complete after the section that makes the last of them. Where all replicas of a node read one copy of the
parameters, these must also not change before the last section that reads them, in which a view counts as what it is
a view of.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sambasim.ir.graph import Graph, SectionKind, node_references
from sambasim.ir.program import Program
from sambasim.ir.types import TensorType
from sambasim.runtime.engine.aliases import may_alias, may_be_left_out

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Readiness:
    """After how many sections of a pass, counted from its first, something may be done."""

    reduce: int
    update: int


def readiness(program: Program) -> Mapping[str, Readiness]:
    """For each group, by name. One more than there are sections means: when the whole pass has ended."""
    training = program.training
    if training is None:
        return {group.name: Readiness(1, 1) for group in program.groups}
    made, read = _made_and_read(training, {name: symbol.type for name, symbol in program.symbols.items()})
    end = len(_differentiating(training)) + 1
    result = {}
    for group in program.groups:
        names = {member.gradient for member in group.members}
        values = [output.value for output in training.outputs if output.symbol in names]
        complete = max((made.get(value, end) for value in values), default=end)
        unread = max((read.get(member.parameter, 0) for member in group.members), default=0)
        result[group.name] = Readiness(reduce=complete, update=max(complete, unread))
    return result


def section_count(program: Program) -> int:
    """How many sections one pass through the training step runs."""
    return len(_differentiating(program.training)) if program.training is not None else 0


def _differentiating(graph: Graph) -> list[tuple[int, int]]:
    """The spans of nodes of the sections that a pass runs, in order."""
    kinds = (SectionKind.FWD, SectionKind.BCKWD)
    return [(section.start, section.stop) for section in graph.sections if section.kind in kinds]


def _made_and_read(graph: Graph, symbols: Mapping[str, TensorType]) -> tuple[dict[str, int], dict[str, int]]:
    """After how many sections each value is made, and each input was read for the last time."""
    types = {**symbols, **graph.values}
    aliases: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in graph.inputs}
    made: dict[str, int] = {}
    read: dict[str, int] = {}
    for position, (start, stop) in enumerate(_differentiating(graph), start=1):
        for node in graph.nodes[start:stop]:
            operands = tuple(node_references(node))
            of_inputs = _NOTHING.union(*(aliases.get(name, _NOTHING) for name in operands))
            read.update(dict.fromkeys(of_inputs, position))
            for result in node.results:
                if result is None:
                    continue
                made[result] = position
                if may_be_left_out(node):
                    alike = [name for name in operands if types[name] == types[result]]
                    aliases[result] = _NOTHING.union(*(aliases.get(name, _NOTHING) for name in alike))
                else:
                    aliases[result] = of_inputs if may_alias(node) else _NOTHING
    end = len(_differentiating(graph)) + 1
    for output in graph.outputs:  # what is handed out is read after the pass
        read.update(dict.fromkeys(aliases.get(output.value, _NOTHING), end))
    return made, read
