"""What tells one model from another with the same tensors, whatever the batch size and the mesh: two digests of its
forward as it was captured, by which a checkpoint knows the PEFs that it belongs to."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from sambasim.ir.graph import Argument, Graph, Node, Ref, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef.weights import bytes_of

_OF_SHAPES = (OperatorKind.VIEW, OperatorKind.COPY, OperatorKind.CREATION, OperatorKind.RANDOM)
_OF_COUNTS = frozenset(
    f"aten.{name}"
    for name in (
        *("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode"),
        *("native_group_norm.default", "affine_grid_generator.default"),
    )
)
"""Operators whose integers may be sizes of the batch: shapes, and counts of samples."""


def digests_of_model(captured: Program, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """`operators_sha256`: the operators of the forward, with their modules, all arguments but integers that may be
    sizes of the batch, and the constants; equal for every batch size. `integers_sha256`: the integers that are left
    out, which are equal for one batch size."""
    graph = captured.training or captured.evaluation
    forward = _forward(graph)
    read = [name for name in graph.inputs if captured.symbols[name].kind is SymbolKind.CONSTANT]
    constants = [(name, str(captured.symbols[name].type), _sha256(bytes_of(weights[name]))) for name in read]
    operators = [(node.operator, node.module, [*_settings(node, _has_sizes(node))]) for node in forward]
    integers = [[*_settings(node, False)] for node in forward if _has_sizes(node)]
    return {
        "operators_sha256": _sha256(repr((operators, constants)).encode()),
        "integers_sha256": _sha256(repr(integers).encode()),
    }


def _forward(graph: Graph) -> list[Node]:
    return [node for one in graph.sections if one.kind is SectionKind.FWD for node in graph.section_nodes(one)]


def _has_sizes(node: Node) -> bool:
    return OPERATORS[node.operator].kind in _OF_SHAPES or node.operator in _OF_COUNTS


def _settings(node: Node, without_integers: bool) -> Iterator[object]:
    """The arguments of `node` that are no values."""

    def given(arguments: Iterable[Argument]) -> Iterator[object]:
        for one in arguments:
            if isinstance(one, tuple):
                yield from given(one)
            elif not isinstance(one, Ref) and not (without_integers and type(one) is int):
                yield one

    yield from given(node.args)
    yield from given(value for _, value in node.kwargs)


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
