"""Tensor types, symbols and device addresses: what a value is, before anything is computed;
and the slices of flat tensors that replicas own."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import prod
from typing import Annotated, TypeAlias

from annotated_types import Interval

from sambasim.errors import LARGEST_BYTES, LARGEST_COUNT, LARGEST_INTEGER, MOST_REPLICAS, InternalError

Size: TypeAlias = Annotated[int, Interval(ge=0, le=LARGEST_BYTES)]
Count: TypeAlias = Annotated[int, Interval(ge=0, le=LARGEST_COUNT)]
Ranks: TypeAlias = Annotated[int, Interval(ge=1, le=MOST_REPLICAS)]
"""Numbers with the bounds that they have in files."""

HIGHEST_RANK = 64
"""Dimensions of a tensor; torch's own limit. It keeps the products of shapes in a file from becoming astronomical."""

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Bytes of one element, by dtype name. A symbol cannot have a dtype that is not here."""

VALUE_BYTES = {**DTYPE_BYTES, "complex64": 8, "complex128": 16}
"""The same for values of graphs: complex numbers are between operators only."""

ALIGNMENT_ELEMENTS = 64
"""Every parameter starts at a multiple of this in its group, and every cut of a group lies on one: fused optimizer
kernels treat a ragged tail differently from the body, so a cut elsewhere would change bits."""

NORM_BLOCK_ELEMENTS = 65_536
"""A gradient norm sums squares by blocks of so many elements of a group. No slice cuts a block, or the norm would
depend on the number of replicas."""


def norm_blocks(numel: int) -> int:
    """The blocks by which the squares of a gradient of `numel` elements are summed."""
    return -(-numel // NORM_BLOCK_ELEMENTS)


ALIGNMENT_BYTES = 512
"""Device addresses are multiples of this: 64 elements of the widest dtype."""


@dataclass(frozen=True, slots=True)
class TensorType:
    dtype: str
    shape: tuple[Size, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * VALUE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class SymbolKind(StrEnum):
    INPUT = "input"
    ARGUMENT = "argument"  # a number that a run sets before each step, such as `step`
    TANGENT = "tangent"  # the gradient that the backward starts from: a runtime input, SambaFlow's `sn_grad`
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor of the model that is in no state_dict: a mask, a plain attribute
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACCUMULATION_GROUP = "accumulation_group"  # the gradients that are reduced together, as one flat tensor
    REDUCE_BUFFER = "reduce_buffer"  # where peers' operands arrive
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Cut:
    """Each of the `parts` ranks on mesh axis `axis` has an equal part along dimension `dim`. With `outer` above 1, it
    is so many tensors joined (query, key and value, say), and each of them is cut."""

    axis: str
    dim: Annotated[int, Interval(ge=0, lt=HIGHEST_RANK)]
    parts: Ranks
    outer: Annotated[int, Interval(ge=1, le=LARGEST_COUNT)] = 1


def whole_type(part: TensorType, cuts: Iterable[Cut]) -> TensorType:
    """The type of the tensor of which each rank has such a part."""
    shape = list(part.shape)
    for cut in cuts:
        shape[cut.dim] *= cut.parts
    return TensorType(part.dtype, tuple(shape))


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named tensor that outlives a section. `offset` is its address in device memory, None if it is handed out.
    `torch_names` are its names in the `state_dict`. `exclusive_bound` is one more than the largest integer seen, for
    synthetic data. `type` is that of the part that a rank holds, if `cuts` says that the tensor is cut."""

    name: str
    kind: SymbolKind
    type: TensorType
    offset: Size | None = None
    torch_names: tuple[str, ...] = ()
    exclusive_bound: Annotated[int, Interval(ge=0, le=LARGEST_INTEGER)] | None = None
    cuts: tuple[Cut, ...] = ()

    @property
    def whole(self) -> TensorType:
        """The type of the whole tensor, of all ranks."""
        return whole_type(self.type, self.cuts)


def align(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


GRADIENT_SUFFIX = "__grad"


def gradient_name(parameter: str) -> str:
    """The symbol of a parameter's gradient. `UniqueNames` keeps that name free for it."""
    return f"{parameter}{GRADIENT_SUFFIX}"


def parameter_of(gradient: str) -> str:
    return gradient.removesuffix(GRADIENT_SUFFIX)


Slice: TypeAlias = tuple[int, int]  # start and stop, in elements


def cut(numel: int, world_size: int) -> tuple[Slice, ...]:
    """The slices of `numel` elements, one for each of `world_size` replicas, in rank order; some may be empty.
    They are disjoint, cover everything, and differ by at most 64 elements (and a ragged end). Raises InternalError if
    the world size is not positive."""
    if world_size < 1:
        raise InternalError(f"cannot cut for {world_size} replicas")
    granules = -(-numel // ALIGNMENT_ELEMENTS)
    cuts = [min(rank * granules // world_size * ALIGNMENT_ELEMENTS, numel) for rank in range(world_size + 1)]
    return tuple(pairwise(cuts))


def cut_at(groups: Sequence[tuple[Sequence[int], int]], world_size: int) -> list[tuple[Slice, ...]]:
    """As `cut`, of several groups, with cuts only at the places that each names, ascending, or at the ends of its
    elements. What a rank has too much of one group, it has less of the next ones."""
    slices, carried = [], [0.0] * world_size
    for places, numel in groups:
        ends, cuts = sorted({0, *places, numel}), [0]
        for rank in range(1, world_size):
            wanted = rank * numel / world_size + carried[rank]
            at = bisect_left(ends, wanted)
            near = min(ends[max(at - 1, 0) : at + 1], key=lambda place: abs(place - wanted))
            cuts.append(max(near, cuts[-1]))
            carried[rank] = wanted - cuts[-1]
        slices.append(tuple(pairwise([*cuts, numel])))
    return slices


PART, NUMBER = TensorType("float32", (ALIGNMENT_ELEMENTS,)), TensorType("float64", ())
"""In the update of an optimizer: a part of a region, and a number of Python."""


def pieces(start: int, stop: int, limit: int) -> tuple[Slice, ...]:
    """`start` to `stop` in pieces of `limit` elements, the last one shorter."""
    return tuple((at, min(at + limit, stop)) for at in range(start, stop, limit))
