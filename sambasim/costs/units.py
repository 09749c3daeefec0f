"""How many compute units can share a product.

A unit holds a block of 32 rows and 32 columns of the operand that is laid out, and the rows of the other stream past
it: the second matrix of a product, the taps of a convolution, the weights of a recurrent layer, the keys of attention.
Products of a batch have blocks of their own. A part of a block wants a part of a unit, but a product wants one at least
in each direction.
"""

from collections.abc import Iterator, Mapping
from math import prod

from sambasim.ir.graph import Argument, Node, references
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.types import TensorType

LANES = 32
"""Numbers that a compute unit works on at once, as DFModel describes it."""

PRODUCTS = frozenset({OperatorKind.MATMUL, OperatorKind.CONVOLUTION, OperatorKind.ATTENTION, OperatorKind.RECURRENT})
"""Kinds of operators that multiply matrices."""

_MATRIX = 2


def units_of(node: Node, types: Mapping[str, TensorType]) -> float:
    """For one of `PRODUCTS`, 1 or more."""
    match OPERATORS[node.operator].kind:
        case OperatorKind.CONVOLUTION:
            shapes = list(_shapes(node.args, types))
            outputs, inputs, *taps = shapes[2 if node.operator.endswith("backward.default") else 1]
            return prod(taps) * _blocks((outputs, inputs))
        case OperatorKind.RECURRENT:
            # The first two arguments are what comes in and the state.
            weights = [shape for shape in _shapes(node.args[2:], types) if len(shape) == _MATRIX]
            weights += [shape for shape in _shapes(node.args[1:2], types) if len(shape) == _MATRIX]
            return max(1.0, sum(map(_blocks, weights)))
        case OperatorKind.ATTENTION:
            keys = list(_shapes(node.args, types))[1:2]
            return _blocks(keys[0]) if keys else 1.0
        case _:
            matrices = [shape for shape in _shapes(node.args, types) if len(shape) >= _MATRIX]
            return _blocks(matrices[-1]) if matrices else 1.0


def _blocks(shape: tuple[int, ...]) -> float:
    """Of a matrix, or of each matrix of a batch."""
    *batch, rows, columns = shape
    return max(1, prod(batch)) * max(1.0, rows / LANES) * max(1.0, columns / LANES)


def _shapes(arguments: Argument, types: Mapping[str, TensorType]) -> Iterator[tuple[int, ...]]:
    for name in references(arguments):
        if name in types:
            yield types[name].shape
