"""How many compute units can share a product.

A unit holds a block of 32 rows and 32 columns of what is laid out on the chip, and the rest streams past it:

    a weight       of a product, the taps of a convolution, the matrices of a recurrent layer
    a sum          the gradient of a weight, to which each row that streams past adds
    other          of a product of two tensors that stream: some rows of the second, as many as are on the chip at a
                   time, but all of those that one product of a batch sums over

A part of a block wants a part of a unit, but a product wants one at least in each direction.
"""

from collections.abc import Callable, Mapping
from math import prod

from sambasim.ir.graph import Node, references
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.types import TensorType

LANES = 32
"""Numbers that a compute unit works on at once, as DFModel describes it."""

PRODUCTS = frozenset({OperatorKind.MATMUL, OperatorKind.CONVOLUTION, OperatorKind.ATTENTION, OperatorKind.RECURRENT})
"""Kinds of operators that multiply matrices."""

STREAMED_ROWS = 256
"""Rows of a tensor that streams which are laid out at a time."""

_MATRIX = 2


def units_of(node: Node, types: Mapping[str, TensorType], is_fixed: Callable[[str], bool]) -> float:
    """For one of `PRODUCTS`, 1 or more. `is_fixed` says of a value whether it stays on the chip."""
    if OPERATORS[node.operator].kind is OperatorKind.CONVOLUTION:
        shapes = [types[name].shape for name in references(node.args) if name in types]
        outputs, inputs, *taps = shapes[2 if node.operator.endswith("backward.default") else 1]
        return prod(taps) * _blocks((outputs, inputs))
    matrices = [name for name in references(node.args) if name in types and len(types[name].shape) >= _MATRIX]
    fixed = [types[name].shape for name in matrices if is_fixed(name)]
    if OPERATORS[node.operator].kind is OperatorKind.RECURRENT:
        return max(1.0, sum(map(_blocks, fixed)))
    if fixed:
        return _blocks(fixed[-1])
    sums = [types[name].shape for name in node.results if name is not None and name in types and is_fixed(name)]
    if sums and len(sums[0]) >= _MATRIX:
        return _blocks(sums[0])
    if not matrices:
        return 1.0
    keys = 1 if OPERATORS[node.operator].kind is OperatorKind.ATTENTION and len(matrices) > 1 else -1
    *batch, rows, columns = types[matrices[keys]].shape
    return _blocks((min(prod(batch) * rows, max(rows, STREAMED_ROWS)), columns))


def _blocks(shape: tuple[int, ...]) -> float:
    """Of a matrix, or of each matrix of a batch."""
    *batch, rows, columns = shape
    return max(1, prod(batch)) * max(1.0, rows / LANES) * max(1.0, columns / LANES)
