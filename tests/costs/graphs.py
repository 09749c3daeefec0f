"""Chains of operators to be priced and cut."""

from collections.abc import Sequence
from itertools import pairwise

from sambasim.costs.work import Work, work_of
from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.types import Symbol, SymbolKind, TensorType

ROWS = 4096


def chain(widths: Sequence[int]) -> Work:
    """The work of a product for each two neighbours of `widths`: [ROWS, a] by a weight [a, b]."""
    return graph_and_work(widths)[1]


def graph_and_work(widths: Sequence[int]) -> tuple[Graph, Work]:
    """The same, with its graph."""
    symbols = {"x": Symbol("x", SymbolKind.INPUT, TensorType("float32", (ROWS, widths[0])))}
    nodes, values, before = [], {}, "x"
    for number, (rows, columns) in enumerate(pairwise(widths)):
        weight, result = f"w{number}", f"y{number}"
        symbols[weight] = Symbol(weight, SymbolKind.PARAMETER, TensorType("float32", (rows, columns)))
        nodes.append(Node(result, "aten.mm.default", (Ref(before), Ref(weight)), results=(result,)))
        values[result] = TensorType("float32", (ROWS, columns))
        before = result
    symbols["out"] = Symbol("out", SymbolKind.OUTPUT, values[before])
    sections = (Section(0, SectionKind.FWD, "forward", 0, len(nodes)),)
    graph = Graph("g", tuple(symbols), tuple(nodes), (Output(before, "out"),), values, sections)
    return graph, work_of(graph, symbols)
