"""How many floating-point operations a product does: formulas over the operands of a node. Each counts only for the
operators whose row in `operators.py` names it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2, prod
from typing import TypeAlias

from sambasim.errors import PefError
from sambasim.ir.graph import Argument, Node, Ref
from sambasim.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Operands:
    """What a formula reads of a node: arguments by position, as capture leaves them. Raises PefError if one is not what
    the operator takes: only a damaged or hand-made PEF can hold such a node."""

    node: Node
    types: Mapping[str, TensorType]

    def argument(self, position: int) -> Argument:
        return self.node.args[position] if position < len(self.node.args) else None

    def misfit(self, position: int, expected: str) -> PefError:
        what = f"argument {position} of {self.node.operator} is not {expected}"
        return PefError(what, where=f"node {self.node.name}", remedy="compile the model again")

    def shape(self, position: int) -> tuple[int, ...]:
        argument = self.argument(position)
        if not isinstance(argument, Ref):
            raise self.misfit(position, "a tensor")
        return self.types[argument.name].shape

    def extent(self, position: int, dimension: int) -> int:
        shape = self.shape(position)
        if not -len(shape) <= dimension < len(shape):
            raise self.misfit(position, f"a tensor with a dimension {dimension}")
        return shape[dimension]

    def rows(self, position: int) -> int:
        """The product of all dimensions but the last: time steps of samples, tokens."""
        return prod(self.shape(position)[:-1])

    def shapes(self, position: int) -> tuple[tuple[int, ...], ...]:
        argument = self.argument(position)
        if not isinstance(argument, tuple):
            raise self.misfit(position, "a list of tensors")
        return tuple(self.types[item.name].shape for item in argument if isinstance(item, Ref))

    def integers(self, position: int) -> tuple[int, ...]:
        argument = self.argument(position)
        items = argument if isinstance(argument, tuple) else (argument,)
        integers = tuple(item for item in items if isinstance(item, int))
        if not integers or len(integers) != len(items):
            raise self.misfit(position, "a list of integers")
        return integers

    def gradients(self, position: int) -> int:
        """How many of the gradients of input and weight the output mask wants."""
        mask = self.argument(position)
        if not isinstance(mask, tuple) or len(mask) != 3:
            raise self.misfit(position, "a list of 3 flags")
        return bool(mask[0]) + bool(mask[1])

    @property
    def result(self) -> int:
        """The elements of the largest result."""
        return max((self.types[name].numel for name in self.node.makes), default=0)


Flops: TypeAlias = Callable[[Operands], int]
"""FLOPs of a product: 2 for a multiplication and an addition, without biases, masks and softmaxes, as torch counts."""


def product(first: int) -> Flops:
    """2 m n k: `first` is the position of the left operand, whose last dimension is summed over; the result is m n."""
    return lambda of: 2 * of.result * of.extent(first, -1)


def einsum(of: Operands) -> int:
    """2 for each combination of indices; for more than two operands that is an upper bound."""
    equation = of.argument(0)
    if not isinstance(equation, str):
        raise of.misfit(0, "an equation")
    extents: dict[str, int] = {}
    for term, shape in zip(equation.replace(" ", "").split("->")[0].split(","), of.shapes(1), strict=False):
        before, dots, after = term.partition("...")
        hidden = len(shape) - len(before) - len(after)
        names = [*before, *(f"...{i}" for i in range(hidden, 0, -1) if dots), *after]
        for name, extent in zip(names, shape, strict=False):
            extents[name] = max(extents.get(name, 1), extent)
    return 2 * prod(extents.values())


def trilinear(of: Operands) -> int:
    """Three tensors, each with dimensions inserted, are multiplied and summed: 3 for each combination."""
    extents: list[int] = []
    for position in range(3):
        shape, inserted = list(of.shape(position)), of.argument(position + 3)
        for dimension in inserted if isinstance(inserted, tuple) else ():
            if isinstance(dimension, int):
                shape.insert(dimension, 1)
        extents = [max(a, b) for a, b in zip(extents, shape, strict=False)] if extents else shape
    return 3 * prod(extents)


def convolution(of: Operands, transposed: bool = False) -> int:
    """2 x pixels of the result (transposed: of the input) x weights [out, in / groups, *kernel]."""
    pixels = prod(of.shape(0)) if transposed else of.result
    return 2 * (pixels // max(of.extent(1, 0), 1)) * prod(of.shape(1))


def convolution_backward(mask: int) -> Flops:
    """As many as the forward for the gradient of the input, and as many for that of the weight, by argument `mask`."""

    def flops(of: Operands) -> int:
        wanted, pixels = of.gradients(mask), prod(of.shape(1 if of.argument(7) is True else 0))
        return wanted * 2 * (pixels // max(of.extent(2, 0), 1)) * prod(of.shape(2))

    return flops


def attention(query: int, by_width: int, by_value: int) -> Flops:
    """For each score (heads x L x S), 2 for each element of so many products with queries or keys, and with values.
    Query, key and value are arguments from `query` on."""

    def flops(of: Operands) -> int:
        scores = of.rows(query) * of.extent(query + 1, -2)
        return 2 * scores * (by_width * of.extent(query, -1) + by_value * of.extent(query + 2, -1))

    return flops


def token_layer(keys: int, *weights: int) -> Flops:
    """The weight matrices for each token, and attention to the tokens of argument `keys`."""

    def flops(of: Operands) -> int:
        if len(of.shape(0)) not in (2, 3):  # one sample may lack its dimension
            raise of.misfit(0, "a tensor of 2 or 3 dimensions")
        matrices = sum(prod(of.shape(position)) for position in weights)
        return 2 * of.rows(0) * matrices + 4 * of.rows(0) * of.extent(keys, -2) * of.extent(0, -1)

    return flops


def recurrent(times: int, *weights: int) -> Flops:
    """Weight matrices so many times for each time step of each sample."""
    return lambda of: times * 2 * of.rows(0) * sum(prod(of.shape(position)) for position in weights)


def factorization(of: Operands) -> int:
    """2 m n min(m, n) for each matrix: the order of LU, QR and singular values, whose constants differ."""
    *batch, rows, columns = (1, 1, *of.shape(0))
    return 2 * prod(batch) * rows * columns * min(rows, columns)


def fourier(of: Operands) -> int:
    """5 n log2 n for each transform of n complex numbers, as is usual; half of it where one side is real."""
    shape, dims = of.shape(0), of.argument(1)
    lengths = [shape[dim] for dim in dims if isinstance(dim, int)] if isinstance(dims, tuple) else []
    real = 1 if of.node.operator.startswith("aten._fft_c2c") else 2
    return int(5 * max(prod(shape), of.result) * log2(max(2, prod(lengths)))) // real
