"""How many floating-point operations a product does (matrix products, convolutions, attention, recurrent layers).

A multiplication and an addition count as two, without biases, masks and softmaxes, as in
`torch.utils.flop_counter`. A formula reads arguments by position, as capture leaves them, and raises PefError if one
is not what the operator takes: only a damaged or hand-made PEF can hold such a node.
"""

from collections.abc import Callable
from math import log2, prod
from typing import TypeAlias

from sambasim.errors import PefError
from sambasim.ir.graph import Argument, Node, Ref
from sambasim.ir.types import TensorType

TypeOf: TypeAlias = Callable[[str], TensorType]

Flops: TypeAlias = Callable[[Node, TypeOf], int]


def _refuse(node: Node, position: int, expected: str) -> PefError:
    return PefError(
        f"argument {position} of {node.operator} is not {expected}",
        where=f"node {node.name}",
        remedy="compile the model again",
    )


def _argument(node: Node, position: int) -> Argument:
    return node.args[position] if position < len(node.args) else None


def _shape(node: Node, type_of: TypeOf, position: int) -> tuple[int, ...]:
    argument = _argument(node, position)
    if not isinstance(argument, Ref):
        raise _refuse(node, position, "a tensor")
    return type_of(argument.name).shape


def _extent(node: Node, type_of: TypeOf, position: int, dimension: int) -> int:
    shape = _shape(node, type_of, position)
    if not -len(shape) <= dimension < len(shape):
        raise _refuse(node, position, f"a tensor with a dimension {dimension}")
    return shape[dimension]


def _shapes(node: Node, type_of: TypeOf, position: int) -> tuple[tuple[int, ...], ...]:
    argument = _argument(node, position)
    if not isinstance(argument, tuple):
        raise _refuse(node, position, "a list of tensors")
    return tuple(type_of(item.name).shape for item in argument if isinstance(item, Ref))


def _output_mask(node: Node, position: int) -> int:
    """How many of the gradients of input and weight are wanted."""
    argument = _argument(node, position)
    if not isinstance(argument, tuple) or len(argument) != 3:
        raise _refuse(node, position, "a list of 3 flags")
    return bool(argument[0]) + bool(argument[1])


def _integers(node: Node, position: int) -> tuple[int, ...]:
    argument = _argument(node, position)
    items = argument if isinstance(argument, tuple) else (argument,)
    integers = tuple(item for item in items if isinstance(item, int))
    if not integers or len(integers) != len(items):
        raise _refuse(node, position, "a list of integers")
    return integers


def _result_numel(node: Node, type_of: TypeOf) -> int:
    return max((type_of(name).numel for name in node.results if name is not None), default=0)


def each_result(count: int) -> Flops:
    """`count` for each element of the largest result."""
    return lambda node, type_of: count * _result_numel(node, type_of)


def product(first: int) -> Flops:
    """2 m n k: `first` is the position of the left operand, whose last dimension is summed over; the result is m n."""
    return lambda node, type_of: 2 * _result_numel(node, type_of) * _extent(node, type_of, first, -1)


def summed_products(node: Node, type_of: TypeOf) -> int:
    """`aten.addbmm`: 2 b m k n, for the operands [b, m, k] and [b, k, n]."""
    return 2 * prod(_shape(node, type_of, 1)) * _extent(node, type_of, 2, -1)


def products(node: Node, type_of: TypeOf) -> int:
    """`aten._foreach_mm`, of two lists of matrices."""
    pairs = zip(_shapes(node, type_of, 0), _shapes(node, type_of, 1), strict=False)
    return sum(2 * prod(a) * b[-1] for a, b in pairs if b)


def tensordot(node: Node, type_of: TypeOf) -> int:
    """2 for each element of the result and of the dimensions that are summed over (argument 2)."""
    summed = prod(_extent(node, type_of, 0, dimension) for dimension in _integers(node, 2))
    return 2 * _result_numel(node, type_of) * summed


def linear_backward(node: Node, type_of: TypeOf) -> int:
    """A product as large as the forward's for the gradient of the input, and one for that of the weight."""
    return _output_mask(node, 3) * 2 * prod(_shape(node, type_of, 0)) * _extent(node, type_of, 2, 0)


def einsum(node: Node, type_of: TypeOf) -> int:
    """2 for each combination of indices; for more than two operands that is an upper bound."""
    equation = _argument(node, 0)
    if not isinstance(equation, str):
        raise _refuse(node, 0, "an equation")
    terms = equation.replace(" ", "").split("->")[0].split(",")
    extents: dict[str, int] = {}
    for term, shape in zip(terms, _shapes(node, type_of, 1), strict=False):
        before, dots, after = term.partition("...")
        hidden = len(shape) - len(before) - len(after)
        names = [*before, *(f"...{i}" for i in range(hidden, 0, -1) if dots), *after]
        for name, extent in zip(names, shape, strict=False):
            extents[name] = max(extents.get(name, 1), extent)
    return 2 * prod(extents.values())


def factorization(node: Node, type_of: TypeOf) -> int:
    """2 m n min(m, n) for each matrix: the order of LU, QR and singular values, whose constants differ."""
    *batch, rows, columns = (1, 1, *_shape(node, type_of, 0))
    return 2 * prod(batch) * rows * columns * min(rows, columns)


def fourier(node: Node, type_of: TypeOf) -> int:
    """5 n log2 n for each transform of n complex numbers, as is usual; half of it where one side is real."""
    given, made = _shape(node, type_of, 0), _result_numel(node, type_of)
    dims = _argument(node, 1)
    lengths = [given[dim] for dim in dims if isinstance(dim, int)] if isinstance(dims, tuple) else []
    real = 1 if node.operator.startswith("aten._fft_c2c") else 2
    return int(5 * max(prod(given), made) * log2(max(2, prod(lengths)))) // real


def trilinear(node: Node, type_of: TypeOf) -> int:
    """`aten._trilinear` multiplies three tensors, each with dimensions inserted, and sums: 3 for each combination."""
    extents: list[int] = []
    for position in range(3):
        shape = list(_shape(node, type_of, position))
        inserted = _argument(node, position + 3)
        for dimension in inserted if isinstance(inserted, tuple) else ():
            if isinstance(dimension, int):
                shape.insert(dimension, 1)
        extents = [max(a, b) for a, b in zip(extents, shape, strict=False)] if extents else shape
    return 3 * prod(extents)


def bilinear(node: Node, type_of: TypeOf) -> int:
    """`aten.bilinear`: each element of the result is x W y, with 3 FLOPs for each element of its matrix W."""
    weight = _shape(node, type_of, 2)
    return 3 * _result_numel(node, type_of) * prod(weight[1:])


def distances(node: Node, type_of: TypeOf) -> int:
    """Distances of all pairs of rows: subtract, raise to a power and add, for each coordinate of each pair."""
    return 3 * _result_numel(node, type_of) * _extent(node, type_of, 0, -1)


def plain_convolution(node: Node, type_of: TypeOf) -> int:
    """2 x pixels of the result x weights: a weight is [out, in / groups, *kernel], so it has all the rest."""
    weight = _shape(node, type_of, 1)
    return 2 * (_result_numel(node, type_of) // max(weight[0], 1)) * prod(weight)


def transposed_convolution(node: Node, type_of: TypeOf) -> int:
    """2 x pixels of the input x weights: here a weight is [in, out / groups, *kernel]."""
    weight = _shape(node, type_of, 1)
    return 2 * (prod(_shape(node, type_of, 0)) // max(weight[0], 1)) * prod(weight)


def convolution(node: Node, type_of: TypeOf) -> int:
    """`aten.convolution`, whose argument 6 says whether it is transposed."""
    transposed = _argument(node, 6) is True
    return transposed_convolution(node, type_of) if transposed else plain_convolution(node, type_of)


def convolution_of_steps(node: Node, type_of: TypeOf) -> int:
    """`aten.conv_tbc`, the weight of which is [steps, in, out]."""
    return 2 * _result_numel(node, type_of) * prod(_shape(node, type_of, 1)[:2])


def convolution_backward(mask: int) -> Flops:
    """As many as the forward for the gradient of the input, and as many for that of the weight, by the output mask,
    which is argument `mask`."""

    def flops(node: Node, type_of: TypeOf) -> int:
        wanted = _output_mask(node, mask)
        weight = _shape(node, type_of, 2)
        pixels = prod(_shape(node, type_of, 1 if _argument(node, 7) is True else 0)) // max(weight[0], 1)
        return wanted * 2 * pixels * prod(weight)

    return flops


def attention(node: Node, type_of: TypeOf) -> int:
    """Two products: queries x keys (2 L S E) and weights x values (2 L S E_v), for each head of each sample."""
    scores, width, value_width = _attention_sizes(node, type_of, 0)
    return 2 * scores * (width + value_width)


def attention_backward(node: Node, type_of: TypeOf) -> int:
    """Five products: the scores once more, and the gradients of weights, values, queries and keys."""
    scores, width, value_width = _attention_sizes(node, type_of, 1)
    return 2 * scores * (3 * width + 2 * value_width)


def _attention_sizes(node: Node, type_of: TypeOf, first: int) -> tuple[int, int, int]:
    """(samples x heads x L x S, E, E_v), where query, key and value are arguments from `first` on."""
    query = _shape(node, type_of, first)
    keys = _extent(node, type_of, first + 1, -2)
    return prod(query[:-1]) * keys, query[-1] if query else 0, _extent(node, type_of, first + 2, -1)


def encoder_layer(node: Node, type_of: TypeOf) -> int:
    """`aten._transformer_encoder_layer_fwd`: the four weight matrices for each token, and self-attention."""
    samples, length, width = _tokens(node, type_of)
    weights = sum(prod(_shape(node, type_of, position)) for position in (3, 5, 14, 16))
    return 2 * samples * length * weights + 4 * samples * length * length * width


def multi_head_attention(node: Node, type_of: TypeOf) -> int:
    """`aten._native_multi_head_attention`: the two weight matrices for each token, and attention."""
    samples, length, width = _tokens(node, type_of)
    weights = sum(prod(_shape(node, type_of, position)) for position in (5, 7))
    return 2 * samples * length * weights + 4 * samples * length * _extent(node, type_of, 1, -2) * width


def _tokens(node: Node, type_of: TypeOf) -> tuple[int, int, int]:
    """(samples, length, width) of the first argument; one sample may lack its dimension."""
    shape = _shape(node, type_of, 0)
    if len(shape) not in (2, 3):
        raise _refuse(node, 0, "a tensor of 2 or 3 dimensions")
    return (shape[0] if len(shape) == 3 else 1), shape[-2], shape[-1]


def recurrent(node: Node, type_of: TypeOf) -> int:
    """Every weight matrix of every layer and direction once for each time step of each sample."""
    steps = prod(_shape(node, type_of, 0)[:-1])
    return 2 * steps * sum(prod(shape) for shape in _shapes(node, type_of, 2) if len(shape) == 2)


def recurrent_cell(node: Node, type_of: TypeOf) -> int:
    """One time step: both weight matrices for each sample."""
    samples = prod(_shape(node, type_of, 0)[:-1])
    return 2 * samples * (prod(_shape(node, type_of, 2)) + prod(_shape(node, type_of, 3)))


def recurrent_layer(count: int) -> Flops:
    """One layer in one direction, `aten.mkldnn_rnn_layer`: its weights once forward (1), twice backward (2)."""

    def flops(node: Node, type_of: TypeOf) -> int:
        steps = prod(_shape(node, type_of, 0)[:-1])
        return count * 2 * steps * (prod(_shape(node, type_of, 1)) + prod(_shape(node, type_of, 2)))

    return flops
