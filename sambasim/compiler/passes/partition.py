"""Cut the forward and the backward into sections: by module, bounded in size.

    level   rule
    o0      one operator a section
    o1      one section for each run of operators of one module, at most 8 operators
    o3      neighbouring runs share a section while together they have at most 16 operators

The bounds stand in for a device's budget of compute and memory units, which no pass weighs yet. The order of execution
never changes, so every level computes the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from sambasim.ir.graph import Graph, Node, Section
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.verify import Stage

OPERATORS_PER_SECTION = {"o0": 1, "o1": 8, "o3": 16}


@dataclass(frozen=True, slots=True)
class Partition:
    """Cut every section of `program` by the rule of `level`."""

    title: ClassVar[str] = "partition into sections"
    reaches: ClassVar[Stage] = Stage.CAPTURED
    level: str

    def __call__(self, program: Program) -> Program:
        def cut(graph: Graph | None) -> Graph | None:
            return None if graph is None else replace(graph, sections=self._sections(graph))

        evaluation = cut(program.evaluation)
        return replace(
            program,
            training=cut(program.training),
            evaluation=evaluation or program.evaluation,
            single=cut(program.single),
        )

    def _sections(self, graph: Graph) -> tuple[Section, ...]:
        sections: list[Section] = []
        for whole in graph.sections:
            start = whole.start
            for piece in self._pieces(graph.section_nodes(whole)):
                sections.append(Section(len(sections), whole.kind, _name(piece), start, start + len(piece)))
                start += len(piece)
        return tuple(sections)

    def _pieces(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        limit = OPERATORS_PER_SECTION[self.level]
        piece: list[Node] = []
        for _, run in groupby(nodes, key=lambda node: node.module):
            members = list(run)
            if piece and (self.level != "o3" or len(piece) + len(members) > limit):
                yield piece
                piece = []
            for node in members:
                if len(piece) == limit:
                    yield piece
                    piece = []
                piece.append(node)
        if piece:
            yield piece


def _name(piece: Sequence[Node]) -> str:
    """Like SambaFlow's: that of the first operator that belongs to a module, and does more than look at its input."""
    of_modules = [node for node in piece if node.module]
    working = (node for node in of_modules if OPERATORS[node.operator].kind is not OperatorKind.VIEW)
    return next(working, next(iter(of_modules), piece[0])).name
