"""What of a training step is worth a digest: what one section hands to another, and what is left when it is over.

Values within a section are not seen. What they come to is: they differ where what leaves the section does.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, node_references
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.records.digests import What

UNWRITTEN: Mapping[str, int] = {
    "aten.mkldnn_rnn_layer.default": 3,  # a kernel's own notes for its backward
    "aten.empty.memory_format": 0,
    "aten.empty_like.default": 0,
    "aten.empty_permuted.default": 0,
    "aten.new_empty.default": 0,
    "aten.new_empty_strided.default": 0,
}
"""By operator: the result that has bytes which nobody has written. They differ from run to run, and decide nothing."""

_OUTPUTS: Mapping[SymbolKind, What] = {SymbolKind.GRADIENT: "gradient", SymbolKind.BUFFER: "buffer"}


class Seen(NamedTuple):
    """One tensor: what it is to the step, what it is called there, and the section that makes it.

    `value` is what the graph calls it while a pass is under way; None for what lies in device memory.
    """

    what: What
    name: str
    section: int | None = None
    value: str | None = None


def seen_of_sections(graph: Graph, program: Program) -> Sequence[Sequence[Seen]]:
    """For each section of the pass of `graph`, in order, what can be seen when it is over, in the order of its nodes.

    A gradient lies in its place then, and all else in a register, because something after it needs it.
    """
    sections, _ = pass_and_update(graph)
    section_of = {
        result: section.index
        for section in sections
        for node in graph.section_nodes(section)
        for result in node.results
        if result is not None
    }
    unwritten = {node.results[UNWRITTEN[node.operator]] for node in graph.nodes if node.operator in UNWRITTEN}
    leaving = {
        name
        for section in sections
        for node in graph.section_nodes(section)
        for name in node_references(node)
        if section_of.get(name, section.index) != section.index and name not in unwritten
    }
    named: dict[str, list[Seen]] = {}
    for output in graph.outputs:
        what = "loss" if output.symbol == program.loss else _OUTPUTS.get(program.symbols[output.symbol].kind)
        if what is not None:
            in_memory = what == "gradient"
            one = Seen(what, output.symbol, section_of.get(output.value), None if in_memory else output.value)
            named.setdefault(output.value, []).append(one)
    return [
        [
            one
            for node in graph.section_nodes(section)
            for result in node.results
            if result is not None
            for one in _seen(result, section.index, result in leaving, named.get(result, ()))
        ]
        for section in sections
    ]


def _seen(value: str, section: int, leaves: bool, named: Sequence[Seen]) -> Sequence[Seen]:
    """What is seen of one value: by its own name only where it has no other. A gradient is the sum in its place, which
    the value may be a part of."""
    shown = any(one.value is not None for one in named)
    return [*([Seen("value", value, section, value)] if leaves and not shown else ()), *named]


def seen_in_memory(program: Program, *kinds: SymbolKind) -> Sequence[Seen]:
    """The symbols of `kinds` that lie in device memory, in the order of the program."""
    whats: Mapping[SymbolKind, What] = {
        SymbolKind.INPUT: "input",
        SymbolKind.PARAMETER: "parameter",
        SymbolKind.BUFFER: "buffer",
    }
    return [Seen(whats[symbol.kind], symbol.name) for symbol in program.symbols.values() if symbol.kind in kinds]
