"""One node as a rehearsal sees it: its arguments by name, the types of its operands, and where they come from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sambasim.ir.graph import Argument, Graph, Node, Ref
from sambasim.ir.types import TensorType
from sambasim.runtime.instructions import find_operator

Types = Mapping[str, TensorType]

_THROUGH = ("aten.alias.default", "aten.detach.default")
"""What autograd puts between a result and the backward that takes it; the bits are the same."""


class Makers:
    """By name of a value: the node that makes it, and which of its results it is."""

    def __init__(self, graph: Graph) -> None:
        self._of: dict[str, tuple[Node, int]] = {}
        for node in graph.nodes:
            for index, name in enumerate(node.results):
                if name is not None:
                    self._of[name] = node, index

    def of(self, value: Argument) -> tuple[Node, int] | None:
        """Who makes `value`; None for a symbol, and for what is no value."""
        found = self._of.get(value.name) if isinstance(value, Ref) else None
        while found is not None and found[0].operator in _THROUGH:
            (inner, *_) = found[0].args
            found = self._of.get(inner.name) if isinstance(inner, Ref) else None
        return found

    def nodes(self, operator: str) -> Iterable[Node]:
        """The nodes of `operator` that make something."""
        return {id(node): node for node, _ in self._of.values() if node.operator == operator}.values()


@dataclass(frozen=True, slots=True)
class Call:
    """`given` are all arguments of `node` by name, defaults included."""

    node: Node
    given: Mapping[str, Argument]
    types: Types
    makers: Makers

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor among the arguments; None where there is none."""
        value = self.given.get(name)
        return self.types[value.name].shape if isinstance(value, Ref) else None

    def dtype(self, name: str) -> str | None:
        """The dtype of a tensor among the arguments; None where there is none."""
        value = self.given.get(name)
        return self.types[value.name].dtype if isinstance(value, Ref) else None

    def maker(self, name: str) -> "tuple[Call, int] | None":
        """The call whose result the argument is, and which result."""
        found = self.makers.of(self.given.get(name))
        return None if found is None else (call_of(found[0], self.types, self.makers), found[1])


def call_of(node: Node, types: Types, makers: Makers) -> Call:
    """The call that `node` is. Raises PefError for an operator that this torch does not have."""
    schema = find_operator(node.operator)._schema
    given: dict[str, Argument] = {
        argument.name: _as_argument(argument.default_value)
        for argument in schema.arguments
        if argument.has_default_value()
    }
    given |= dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    return Call(node, given | dict(node.kwargs), types, makers)


def _as_argument(value: object) -> Argument:
    if isinstance(value, list):
        return tuple(_as_argument(item) for item in value)
    return value if isinstance(value, bool | int | float | str) else None
