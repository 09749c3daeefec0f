"""Where two graphs first differ, and all differences of two sets of symbols. Names of values and source lines do
not count: values are compared by the node and the result that make them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from sambasim.ir.graph import Argument, Graph, Node, Output, Ref
from sambasim.ir.types import Symbol


def node_difference(before: Graph, after: Graph) -> tuple[int, Node | None, Node | None] | None:
    """The position of the first nodes that differ, and the nodes; None where one graph has no more."""
    numbers = _numbers(before), _numbers(after)
    for position, (node, other) in enumerate(zip_longest(before.nodes, after.nodes)):
        if _numbered(node, numbers[0]) != _numbered(other, numbers[1]):
            return position, node, other
    return None


def output_difference(before: Graph, after: Graph) -> str | None:
    """The symbol of the first output that differs, for graphs with equal nodes."""
    numbers = _numbers(before), _numbers(after)
    for output, other in zip_longest(before.outputs, after.outputs):
        if _output(output, numbers[0]) != _output(other, numbers[1]):
            return str((output or other).symbol)
    return None


def section_difference(before: Graph, after: Graph) -> int | None:
    """The number of the first section of another kind, or with other nodes."""
    extents = ([(section.kind, section.start, section.stop) for section in graph.sections] for graph in (before, after))
    pairs = enumerate(zip_longest(*extents))
    return next((number for number, (section, other) in pairs if section != other), None)


def symbol_differences(
    before: Mapping[str, Symbol], after: Mapping[str, Symbol]
) -> Iterator[tuple[str, Symbol | None, Symbol | None]]:
    """The name and both symbols where kind or type differ, in the order of `before`; None where one does not exist."""
    for name in dict.fromkeys((*before, *after)):
        symbols = before.get(name), after.get(name)
        kinds = [symbol and (symbol.kind, symbol.type) for symbol in symbols]
        if kinds[0] != kinds[1]:
            yield name, *symbols


def _numbers(graph: Graph) -> Mapping[str, str]:
    return {
        name: f"{position}.{result}"
        for position, node in enumerate(graph.nodes)
        for result, name in enumerate(node.results)
        if name is not None
    }


def _numbered(node: Node | None, numbers: Mapping[str, str]) -> Node | None:
    """`node` without its name and line, with numbers for the names of values."""
    if node is None:
        return None
    args = tuple(_argument(argument, numbers) for argument in node.args)
    kwargs = tuple((name, _argument(argument, numbers)) for name, argument in node.kwargs)
    results = tuple(None if name is None else numbers[name] for name in node.results)
    return replace(node, name="", source=None, args=args, kwargs=kwargs, results=results)


def _argument(argument: Argument, numbers: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(numbers.get(argument.name, argument.name))
    return tuple(_argument(item, numbers) for item in argument) if isinstance(argument, tuple) else argument


def _output(output: Output | None, numbers: Mapping[str, str]) -> tuple[str, str] | None:
    return None if output is None else (output.symbol, numbers.get(output.value, output.value))
