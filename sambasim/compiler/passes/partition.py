"""Cut the forward and the backward into sections, under the budget of the device: see `sambasim.costs.cut`.

The order of execution never changes, so every level computes the same bits.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from sambasim.costs.cut import Level, cut
from sambasim.costs.work import work_of
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Graph, Section
from sambasim.ir.program import Program
from sambasim.ir.verify import Stage


@dataclass(frozen=True, slots=True)
class Partition:
    """Cut every graph of a program by the rule of `level`, for what `budget` has."""

    title: ClassVar[str] = "partition into sections"
    reaches: ClassVar[Stage] = Stage.CAPTURED
    level: Level
    budget: Budget

    def __call__(self, program: Program) -> Program:
        def sections_of(graph: Graph) -> tuple[Section, ...]:
            pieces = cut(graph, work_of(graph, program.symbols), self.budget, self.level)
            return tuple(Section(index, one.kind, one.name, *one.nodes) for index, one in enumerate(pieces))

        def divided(graph: Graph) -> Graph:
            return replace(graph, sections=sections_of(graph))

        return replace(
            program,
            training=None if program.training is None else divided(program.training),
            evaluation=divided(program.evaluation),
            single=None if program.single is None else divided(program.single),
        )
