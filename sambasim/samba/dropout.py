"""Dropout rates that an app changes at run time: `hyperparam_dict={"p": 0.0}`, or one rate by its argument's name.

A PEF holds the rate of each dropout as a constant of its operators; a session runs a copy of the graph with other
constants. Dropout of elements is `native_dropout`, with its backward; dropout of channels (Dropout1d, 2d and 3d) is
`bernoulli`, whose result is divided by the share that is kept. AlphaDropout keeps its compiled rate.
"""

from collections.abc import Mapping
from dataclasses import replace

from sambasim.ir.graph import Graph, Node, Ref

ALL = "p"
"""The name that stands for every dropout of the model."""

_ELEMENTS, _CHANNELS = "aten.native_dropout.default", "aten.bernoulli.p"
_BACKWARD = "aten.native_dropout_backward.default"


def rate_names(graph: Graph) -> tuple[str, ...]:
    """The arguments for the rates of `graph`, one for each dropout: `net__drop__dropout_p`, or `…__dropout2d_p`."""
    return tuple(name for node in graph.nodes if (name := _name(graph, node)) is not None)


def with_rates(graph: Graph, rates: Mapping[str, float]) -> Graph:
    """`graph` with the dropout rates in `rates`, each at least 0 and below 1, by argument name or for `ALL`."""
    kept: dict[str, float] = {}  # by the value whose scale follows from the rate
    nodes = []
    for node in graph.nodes:
        name = _name(graph, node)
        rate = None if name is None else rates.get(name, rates.get(ALL))
        first = node.args[0] if node.args else None
        if rate is not None and node.operator == _ELEMENTS:
            node = replace(node, args=(node.args[0], rate, *node.args[2:]))
            kept |= {result: 1 - rate for result in node.results[1:] if result is not None}
        elif rate is not None:
            node = replace(node, args=(node.args[0], 1 - rate, *node.args[2:]))
            kept |= {result: 1 - rate for result in node.results if result is not None}
        elif node.operator == _BACKWARD and isinstance(node.args[1], Ref) and node.args[1].name in kept:
            node = replace(node, args=(*node.args[:2], 1 / kept[node.args[1].name]))
        elif node.operator.startswith("aten.div.") and isinstance(first, Ref) and first.name in kept:
            node = replace(node, args=(first, kept[first.name], *node.args[2:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _name(graph: Graph, node: Node) -> str | None:
    owner = node.name.rpartition("__")
    if node.operator == _ELEMENTS:
        return f"{owner[0]}__{owner[2].replace('native_dropout', 'dropout')}_p"
    if node.operator == _CHANNELS and node.results[0] is not None and _is_divided(graph, node):
        dimensions = len(graph.values[node.results[0]].shape) - 2
        return f"{owner[0]}__{owner[2].replace('bernoulli', f'dropout{dimensions}d')}_p"
    return None


def _is_divided(graph: Graph, node: Node) -> bool:
    """Whether the result is divided by its own share, as in dropout of channels, and read by nothing else before."""
    reference, share = Ref(node.results[0] or ""), node.args[1]
    readers = [one for one in graph.nodes if reference in one.args]
    return len(readers) == 1 and readers[0].operator.startswith("aten.div.") and readers[0].args[1] == share
