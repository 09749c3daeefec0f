"""Which values of a graph may share memory."""

from collections.abc import Iterator, Sequence

from sambasim.ir.graph import Node, node_references
from sambasim.ir.operator_table import OperatorKind
from sambasim.ir.operators import OPERATORS

MAY_ALIAS = (OperatorKind.VIEW, OperatorKind.COPY, OperatorKind.RANDOM, OperatorKind.RESIZE)
"""Operators that may return their operand's memory: a copy that changes nothing does, and so does dropout at 0."""

_ADDITION_AND_PRODUCT = (
    "aten.add.Tensor",
    "aten.sub.Tensor",
    "aten.mul.Tensor",
    "aten.div.Tensor",
    "aten.positive.default",
)


def kind_of(node: Node) -> OperatorKind | None:
    """The kind of the operator of `node`; None for compiled code, which returns memory of its own."""
    operator = OPERATORS.get(node.operator)
    return None if operator is None else operator.kind


def may_alias(node: Node) -> bool:
    """Whether a result of `node` may share memory with an operand."""
    return kind_of(node) in MAY_ALIAS


def may_be_left_out(node: Node) -> bool:
    """Whether a compiler may find that `node` changes nothing (a product with ones) and return its operand."""
    return node.operator in _ADDITION_AND_PRODUCT


def aliases_of(value: str, nodes: Sequence[Node]) -> set[str]:
    """`value`, and all values that may share its memory. `nodes` are in order, and include all that read it."""
    found = {value}
    for node in nodes:
        if may_alias(node) and not found.isdisjoint(node_references(node)):
            found.update(_named(node))
    return found


def last_reader(values: set[str], nodes: Sequence[Node]) -> int:
    """The position of the last node that reads one of `values`; -1 if none does."""
    for position in range(len(nodes) - 1, -1, -1):
        if not values.isdisjoint(node_references(nodes[position])):
            return position
    return -1


def _named(node: Node) -> Iterator[str]:
    return (result for result in node.results if result is not None)
