"""The mean of gradients over replicas, and the norm of all gradients, each added in one fixed order.

Mean: the binary tree of `collectives`. With a narrower wire, every operand of an addition is rounded to it, a partial
sum too, and the last sum is not: what one node sends another fits the wire, wherever nodes end. Norm: squares are
summed in float64 by blocks of a parameter, and the block sums in the order of parameters; no slice cuts a block. So the
bits do not depend on which rank adds, nor on groups.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sambasim.collectives import Addition, additions
from sambasim.errors import MachineError
from sambasim.ir.program import Member, ParameterGroup
from sambasim.ir.types import NORM_BLOCK_ELEMENTS, Slice, pieces
from sambasim.runtime.machine.kernels import build

CHUNK_ELEMENTS = 131_072
"""Elements that are summed at a time: few enough for a core's cache, enough to outweigh the calls."""

_BLOCK_ELEMENTS = 64  # elements that are added at a time: their sums stay in the L1 cache

_REALS = {torch.float32: ("float", ctypes.c_float), torch.float64: ("double", ctypes.c_double)}

Sum: TypeAlias = Callable[[], None]

Wire: TypeAlias = Literal["fp32", "bf16"]

Kernel: TypeAlias = Callable[[Sequence[Tensor], Tensor, bool, float, bool], Sum]
"""`kernel(operands, out, divides, number, near)` makes the function that writes the sum, times `number` or divided by
it, to `out`, which may be one of the operands. `near`: all operands are in the core's own cache: changes no bit."""


def sent_as(group: ParameterGroup, wire: Wire) -> torch.dtype:
    """The dtype in which gradients of `group` are sent to other nodes, and through hosts."""
    return torch.bfloat16 if wire == "bf16" and group.dtype == "float32" else getattr(torch, group.dtype)


def tree_mean(
    operands: Sequence[Tensor],
    out: Tensor,
    divisor: int,
    *,
    near: bool = False,
    steps: tuple[Addition, ...] | None = None,
    wire: Wire = "fp32",
) -> Sum:
    """A function that writes the sum of `operands` over `divisor` to `out`; all are flat and of one length, and `out`
    may be one of them. `near`: all operands lie in the core's own cache. `steps`: pairs of operand positions, each of
    which adds the second to the first; by default in rank order. `wire`: to which operands of float32 sums are rounded;
    those that have come from other ranks may have it."""
    divides = divisor & (divisor - 1) != 0  # x * (1/3) is not x / 3; a power of two is exact, and a product faster
    number = float(divisor) if divides else 1 / divisor
    rounds = wire == "bf16" and out.dtype is torch.float32
    return _kernel_of(len(operands), out.dtype, steps, rounds)(operands, out, divides, number, near)


@cache
def _kernel_of(count: int, dtype: torch.dtype, steps: tuple[Addition, ...] | None, rounds: bool) -> Kernel:
    steps = additions(count) if steps is None else steps
    return tree_mean_kernel(steps, dtype, rounds) or torch_tree_mean(steps, dtype, rounds)


def tree_mean_build(dtype: torch.dtype, rounds: bool = False) -> ctypes.CDLL | MachineError:
    return build("tree_mean", f"REAL={_REALS[dtype][0]}", f"BLOCK={_BLOCK_ELEMENTS}", *["ROUNDS"] * rounds)


def tree_mean_kernel(steps: Sequence[Addition], dtype: torch.dtype, rounds: bool = False) -> Kernel | None:
    """The kernel in C; None if there is nothing to add, for other dtypes, and without a C compiler. `rounds`: operands
    to bfloat16."""
    library = tree_mean_build(dtype, rounds) if steps and dtype in _REALS else None
    if not isinstance(library, ctypes.CDLL):
        return None
    pointer, integer, real, function = ctypes.c_void_p, ctypes.c_int32, _REALS[dtype][1], library.tree_mean
    function.restype = None
    # For each step, where its summands and its sum are: operands count from 0 up, sums from -1 down.
    where: dict[int, int] = {}
    rows = []
    for into, source in steps:
        total = where.get(into, -1 - len(where))  # a sum keeps its row when it is added to
        rows.append([where.get(into, into), where.get(source, source), total])
        where[into] = total
    places, sums = torch.tensor(rows, dtype=torch.int32), torch.empty(len(steps) * _BLOCK_ELEMENTS, dtype=dtype)

    def bound(operands: Sequence[Tensor], out: Tensor, divides: bool, number: float, near: bool) -> Sum:
        # Each is of the C type that the function takes: without `argtypes`, ctypes would pass an int as 32 bits.
        addresses = (pointer * len(operands))(*[operand.data_ptr() for operand in operands])
        narrow = bytes(operand.dtype is not dtype for operand in operands)
        added = pointer(places.data_ptr()), integer(len(steps)), integer(near), narrow, pointer(sums.data_ptr())
        result = pointer(out.data_ptr()), ctypes.c_int64(out.numel()), integer(divides), real(number)
        add_up = partial(function, addresses, *added, *result)
        vars(add_up)["tensors"] = (places, sums, out, *operands)  # which it keeps alive
        return add_up

    return bound


def torch_tree_mean(steps: Sequence[Addition], dtype: torch.dtype, rounds: bool = False) -> Kernel:
    """The kernel by torch's operators: for other dtypes, and without a C compiler."""
    # Operands must not be written to: from its first addition on, a sum has a buffer of its own.
    places = {into: torch.empty(CHUNK_ELEMENTS, dtype=dtype) for into, _ in steps}

    def bound(operands: Sequence[Tensor], out: Tensor, divides: bool, number: float, near: bool) -> Sum:
        spans = [slice(start, stop) for start, stop in pieces(0, out.numel(), CHUNK_ELEMENTS)]
        chunks = [([operand[span] for operand in operands], out[span]) for span in spans]

        def add_up() -> None:
            for parts, result in chunks:
                sums = parts.copy()
                for position, (into, source) in enumerate(steps, start=1):
                    target = result if position == len(steps) else places[into][: result.numel()]
                    summands = [sums[into], sums[source]]
                    if rounds:
                        summands = [summand.bfloat16().float() for summand in summands]
                    sums[into] = torch.add(*summands, out=target)
                if not steps:
                    result.copy_(sums[0])
                if divides:
                    result.div_(number)
                elif number != 1.0:
                    result.mul_(number)

        return add_up

    return bound


Part: TypeAlias = tuple[Member, int, Tensor]  # a part of a member: where it begins there, and its numbers


def square_sums(parts: Iterable[Part], count: int) -> Callable[[], list[float]]:
    """A function that sums the squares of `count` blocks. `parts`: of gradients, each of whole blocks."""
    blocks = [
        (member.block + (begin + a) // NORM_BLOCK_ELEMENTS, gradient[a:b])
        for member, begin, gradient in parts
        for a, b in pieces(0, gradient.numel(), NORM_BLOCK_ELEMENTS)
    ]

    def add_up() -> list[float]:
        sums = [0.0] * count
        for number, block in blocks:
            sums[number] = float(block.double().square_().sum())
        return sums

    return add_up


def parts_of(group: ParameterGroup, flat: Tensor, owned: Slice) -> list[Part]:
    """The parts of `flat` in a slice of `group`, one for each member."""
    start, stop = owned
    inside = [member for member in group.members if member.start < stop and start < member.start + member.numel]
    spans = [(member, max(member.start, start), min(member.start + member.numel, stop)) for member in inside]
    return [(member, a - member.start, flat[a:b]) for member, a, b in spans if a < b]


def total_norm(sums: Iterable[float]) -> float:
    total = 0.0
    for block in sums:
        total += block
    return math.sqrt(total)
