"""From a value that is not finite back to where that began.

A value that is not finite is an origin if its operator made it so: NaN of operands without any, or an infinity of
finite operands. One that has an infinite constant, as a mask has, was meant to: it counts only if there is no other. An
infinity that comes to nothing later (`exp(-inf)`) leads to no loss, and is not asked about.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from sambasim.ir.graph import Argument, Graph, Node, node_references
from sambasim.runtime.numerics.count import Count

_FINITE, _INFINITE, _NAN = range(3)


class Lineage:
    """What makes what in `graph`."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._maker = {name: at for at, node in enumerate(graph.nodes) for name in node.results if name is not None}

    def reached(self, values: Iterable[str], seen: Mapping[str, Count]) -> set[str]:
        """The values that are not finite and from which `values` have it, those included. `seen` tells of what was
        looked at; the rest are views that nobody needed to take, and have what they are views of."""
        reached: set[str] = set()
        waiting = list(values)
        while waiting:
            name = waiting.pop()
            if name in reached or self._kind(name, seen) == _FINITE:
                continue
            reached.add(name)
            kinds = {operand: self._kind(operand, seen) for operand in self._operands(name)}
            # NaN comes of NaN where there is any, and else of infinities.
            worst = max(kinds.values(), default=_FINITE) if self._kind(name, seen) == _NAN else _INFINITE
            waiting += [operand for operand, kind in kinds.items() if kind >= worst]
        return reached

    def position(self, value: str) -> int:
        """Of the node that makes `value`; before all nodes if it is a symbol."""
        return self._maker.get(value, -1)

    def node(self, value: str) -> Node | None:
        """What makes `value`; None for a symbol."""
        return self._nodes[self._maker[value]] if value in self._maker else None

    def _operands(self, name: str) -> Sequence[str]:
        return list(node_references(self._nodes[self._maker[name]])) if name in self._maker else ()

    def _kind(self, name: str, seen: Mapping[str, Count]) -> int:
        if name in seen:
            return _NAN if seen[name].nan else _INFINITE if seen[name].infinite else _FINITE
        return max((self._kind(operand, seen) for operand in self._operands(name)), default=_FINITE)


def is_origin(result: Count, operands: Sequence[Count]) -> bool:
    """Whether a node itself made `result`, which is not finite, of `operands`."""
    if result.nan and not any(operand.nan for operand in operands):
        return True
    return bool(result.infinite) and all(operand.finite for operand in operands)


def leaves_memory_as_it_is(node: Node) -> bool:
    """Whether what `node` makes is memory with whatever was there before."""
    return node.operator.split(".")[1] in ("empty", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")


def has_infinite_constant(node: Node) -> bool:
    """Whether infinity is among what `node` is always given."""
    return any(map(_is_infinite, (*node.args, *(value for _, value in node.kwargs))))


def _is_infinite(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(map(_is_infinite, argument))
    return isinstance(argument, float) and math.isinf(argument)
