"""What `bench` reduces: a program of one flat gradient group, its operands, and the expected result."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import DATA_PARALLEL, Axis
from sambasim.ir.program import DataParallel, GradientGroup, Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.slices import CUT_ELEMENTS
from sambasim.ir.types import ALIGNMENT_BYTES, DTYPE_BYTES, Symbol, SymbolKind, TensorType, align
from sambasim.runtime.mean import tree_mean

_GROUP = "group_0"
_DTYPE = "float32"

ELEMENT_BYTES = DTYPE_BYTES[_DTYPE]
GRANULE_BYTES = CUT_ELEMENTS * ELEMENT_BYTES
"""A group consists of whole cuts, so its size is a multiple of this."""


def flat_program(numel: int) -> Program:
    """A program with `numel` float32 gradients, rounded up to whole cuts, a reduce operand buffer of that size, and no
    optimizer state. Parameters share the memory of the gradients, so GATHER sends the means."""
    numel = align(max(numel, 1), CUT_ELEMENTS)
    size_bytes = align(numel * ELEMENT_BYTES, ALIGNMENT_BYTES)
    group = ParameterGroup(_GROUP, _DTYPE, numel, (), 0, {"parameter": 0, "gradient": 0})
    buffer = Symbol("reduce_buffer", SymbolKind.REDUCE_BUFFER, TensorType(_DTYPE, (numel,)), offset=size_bytes)
    return Program(
        name="flat",
        batch_size=1,
        symbols={buffer.name: buffer},
        training=None,
        evaluation=Graph("evaluation", (), (), (), {}),
        single=None,
        loss=None,
        per_sample_loss=False,
        optimizers=(Optimizer("sgd0", "sgd", ()),),
        groups=(group,),
        runtime_arguments=(RuntimeArgument("dp_scale_factor", 1, "replicas"),),
        data_parallel=DataParallel((GradientGroup(_GROUP, _GROUP),), buffer.name),
        device_bytes=2 * size_bytes,
        mesh=(Axis(DATA_PARALLEL, 1, at_run_time=True),),
    )


PERIOD_ELEMENTS = 65_521
"""The length of a block: a prime, so that no two slices, pages or chunks have the same content."""

_EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Expected:
    """A result, as a repeating block. `bound`: the maximum error of each element; None if the bits must be equal."""

    block: Tensor
    bound: Tensor | None = None

    def first_difference(self, part: Tensor, start: int) -> int | None:
        """The index of the first wrong element in `part`, which begins at element `start` of the result, or None."""
        for a, b, at in _blocks(start, start + part.numel()):
            found, wanted = part[a - start : b - start], self.block[at : at + b - a]
            if self.bound is None:
                right = found.view(torch.int32) == wanted.view(torch.int32)
            else:
                right = (found - wanted).abs() <= self.bound[at : at + b - a]  # False for NaN
            if not bool(right.all()):
                return a + int(right.logical_not().nonzero()[0])
        return None

    def at(self, element: int) -> float:
        return float(self.block[element % PERIOD_ELEMENTS])


@dataclass(frozen=True, slots=True)
class Operands:
    """This rank's block for one turn, and the expected results: `mean` in the order of the tree, the others in float64,
    rounded once, with bounds for any order of float32 additions."""

    own: Tensor
    mean: Expected
    near_mean: Expected
    near_sum: Expected


def draw(turn: int, rank: int, world_size: int, numel: int) -> Operands:
    """The operands of turn `turn` (from 0), for buffers of `numel` elements."""
    blocks = [_block(turn * world_size + other, numel) for other in range(world_size)]
    wide = torch.stack(blocks).double()
    total, size = wide.sum(0), wide.abs().sum(0)
    # eps / 2 for each of n - 1 additions, the division, and the rounding of the reference; doubled for safety.
    bound = ((world_size + 1) * _EPSILON * size).float()
    near_mean = Expected((total / world_size).float(), bound / world_size)
    mean = torch.empty_like(blocks[0])
    tree_mean(blocks, mean, world_size)
    if near_mean.first_difference(mean, 0) is not None:
        raise InternalError("the tree of additions is not near the mean in float64")
    return Operands(blocks[rank], Expected(mean), near_mean, Expected(total.float(), bound))


def fill(flat: Tensor, block: Tensor) -> None:
    for a, b, at in _blocks(0, flat.numel()):
        flat[a:b].copy_(block[at : at + b - a])


def _block(seed: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(min(PERIOD_ELEMENTS, numel), generator=generator)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split elements `start` to `stop` at block boundaries: yields (from, to, position of `from` in its block)."""
    while start < stop:
        at = start % PERIOD_ELEMENTS
        end = min(start - at + PERIOD_ELEMENTS, stop)
        yield start, end, at
        start = end
