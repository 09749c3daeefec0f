"""Refuse what has no room on the device: see `sambasim.costs.fit`."""

from dataclasses import dataclass
from typing import ClassVar

from sambasim.costs.fit import check_chip, check_memory, need_of
from sambasim.costs.work import stage_ranges, work_of
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.verify import Stage


@dataclass(frozen=True, slots=True)
class Fits:
    """Leave the program as it is. Raises MachineError if one replica of it does not fit on `budget`."""

    title: ClassVar[str] = "check that it fits"
    reaches: ClassVar[Stage] = Stage.PLACED
    budget: Budget

    def __call__(self, program: Program) -> Program:
        graph = program.training or program.evaluation
        work = work_of(graph, program.symbols)
        check_chip(graph, work, self.budget)
        ends = [one.stop for one in graph.sections if one.kind in (SectionKind.FWD, SectionKind.BCKWD)]
        check_memory(graph, need_of(program, work, stage_ranges(work, ends)), self.budget)
        return program
