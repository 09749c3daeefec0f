"""Graphs without the names of their values, so that two can be compared: names are counted, and one value more shifts
all that follow. A value is called by the node and the result that it is."""

from collections.abc import Mapping
from dataclasses import replace

from sambasim.ir.graph import Argument, Graph, Node, Output, Ref


def numbers(graph: Graph) -> dict[str, str]:
    """For each value that a node defines, where it comes from."""
    return {
        name: f"{position}.{result}"
        for position, node in enumerate(graph.nodes)
        for result, name in enumerate(node.results)
        if name is not None
    }


def numbered(node: Node | None, numbers: Mapping[str, str]) -> Node | None:
    """`node` without its name and line, with numbers for the names of values."""
    if node is None:
        return None
    args = tuple(_argument(argument, numbers) for argument in node.args)
    kwargs = tuple((name, _argument(argument, numbers)) for name, argument in node.kwargs)
    results = tuple(None if name is None else numbers[name] for name in node.results)
    return replace(node, name="", source=None, args=args, kwargs=kwargs, results=results)


def numbered_output(output: Output | None, numbers: Mapping[str, str]) -> tuple[str, str] | None:
    """The symbol of an output, and where its value comes from."""
    return None if output is None else (output.symbol, numbers.get(output.value, output.value))


def _argument(argument: Argument, numbers: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(numbers.get(argument.name, argument.name))
    if isinstance(argument, tuple):
        return tuple(_argument(item, numbers) for item in argument)
    return argument
