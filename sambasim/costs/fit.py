"""Whether a program fits on a budget at all: into the memory beside the chip, and each operator onto the chip."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sambasim.costs.residency import Residency, reside
from sambasim.costs.work import Stage, Work
from sambasim.errors import MachineError
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Graph, Node
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.units import format_bytes

_WITH_A_HOME = (SymbolKind.GRADIENT, SymbolKind.BUFFER)
_WHOLE_ROWS = (OperatorKind.SOFTMAX, OperatorKind.LOSS, OperatorKind.NORMALIZATION, OperatorKind.SCAN)
"""Operators that look at a whole row before they give any of it; others work on parts of rows."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes beside the chip that one replica needs: what the program keeps, and what sections hand on."""

    kept_bytes: int
    residency: Residency

    @property
    def size_bytes(self) -> int:
        """Both."""
        return self.kept_bytes + self.residency.size_bytes


def need_of(program: Program, work: Work, sections: Sequence[tuple[int, int]], samples: int | None = None) -> Need:
    """Of the training step of `program`, or its evaluation, whose `sections` are ranges of stages of `work`; `samples`
    are those of a batch, if there are other than the program was compiled for."""
    graph = program.training or program.evaluation
    homes = frozenset(o.value for o in graph.outputs if program.symbols[o.symbol].kind in _WITH_A_HOME)
    inputs_bytes = sum(one.type.size_bytes for one in program.symbols.values() if one.kind is SymbolKind.INPUT)
    more_bytes = 0 if samples is None else inputs_bytes * (samples - program.batch_size) // program.batch_size
    return Need(program.device_bytes + more_bytes, reside(work, sections, homes))


def check_memory(graph: Graph, need: Need, budget: Budget) -> None:
    """Raise MachineError if the memory beside the chip is too small for `need`."""
    if need.size_bytes <= budget.capacity_bytes:
        return
    residency = need.residency
    message = (
        f"one replica needs {format_bytes(need.size_bytes)} of {_memory(budget)}, and {budget.where} has"
        f" {format_bytes(budget.capacity_bytes)}: {format_bytes(need.kept_bytes)} is for what the program keeps,"
        f" {format_bytes(residency.size_bytes)} for tensors between sections"
    )
    where = None
    if residency.boundaries:
        largest = max(
            (one for one in residency.boundaries if one.first <= residency.fullest <= one.last),
            key=lambda one: one.size_bytes,
        )
        node = next(node for node in graph.nodes if largest.value in node.results)
        where = _place(node)
        message += f"; the largest of them, {format_bytes(largest.size_bytes)}, is the result of {node.operator}"
    raise MachineError(message, where=where, remedy=_remedy(budget))


def check_chip(graph: Graph, work: Work, budget: Budget) -> None:
    """Raise MachineError for an operator that wants whole rows, and of which not even two of each tensor have room on
    the chip, as the buffers between stages want it."""
    for stage in work.stages:
        node = graph.nodes[stage.node]
        if OPERATORS[node.operator].kind not in _WHOLE_ROWS:
            continue
        needed = _two_rows_bytes(work, stage)
        if needed > budget.chip_bytes:
            raise MachineError(
                f"two rows of what {node.operator} reads and writes take {format_bytes(needed)} of memory on the chip,"
                f" and a section on {budget.where} has {format_bytes(budget.chip_bytes)}",
                where=_place(node),
                remedy=_remedy(budget),
            )


def _two_rows_bytes(work: Work, stage: Stage) -> int:
    tensors = (work.tensors[value] for value in {*(read.value for read in stage.reads), *stage.writes})
    return 2 * sum(tensor.row_bytes for tensor in tensors if not tensor.resident)


def states_bytes(symbols: Iterable[Symbol]) -> int:
    """What the states of optimizers take."""
    return sum(symbol.type.size_bytes for symbol in symbols if symbol.kind is SymbolKind.OPTIMIZER_STATE)


def _place(node: Node) -> str:
    return str(node.source or node.name)


def _memory(budget: Budget) -> str:
    return "HBM and DDR" if budget.behind else budget.memory


def _remedy(budget: Budget) -> str:
    more = "a larger --num-tiles, " if " of " in budget.where else ""
    return f"give {more}a smaller model or batch, or another --arch"
