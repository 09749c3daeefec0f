r"""The one order in which replicas are added: a balanced binary tree over ranks, in rank order.

    rank   0   1   2   3   4   5
            \ /     \ /     \ /
             +       +       +
              \     /        |        an absent leaf is skipped: adding a zero would turn -0.0 into +0.0
                 +           |
                  \         /
                       +

Floating-point addition is not associative, so the bits of a sum are those of its order. This order depends on the
number of replicas alone: not on who adds, on the sync path, or on which node a replica is. It nests: an aligned block
of 2^k ranks is a subtree, whose sum can be formed on its own.
"""

from typing import TypeAlias

from sambasim.errors import InternalError

Addition: TypeAlias = tuple[int, int]  # (into, from): the operand of rank `into` becomes its sum with that of `from`


def additions(world_size: int) -> tuple[Addition, ...]:
    """The additions that leave the sum of all operands in that of rank 0, in an order that can be carried out.

    Raises InternalError if world_size < 1.
    """
    if world_size < 1:
        raise InternalError(f"a sum over {world_size} replicas")
    steps: list[Addition] = []
    stride = 1
    while stride < world_size:
        steps += ((rank, rank + stride) for rank in range(0, world_size - stride, 2 * stride))
        stride *= 2
    return tuple(steps)
