"""Kernels of PyTorch that take their operands on trust, and what must hold before they are called.

Torch's own callers (autograd above all) give them what another kernel has made. Given anything else, they read or write where
they should not, or divide by zero: the process dies, or worse. Each row was found by `tests/fuzz` or in the kernel's source; a row
says what is wrong with a node, or None.
"""

from collections.abc import Callable, Mapping

from sambasim.ir.graph import Argument, Node, Ref
from sambasim.ir.types import TensorType

Types = Mapping[str, TensorType]
Check = Callable[[Node, Types], str | None]


def hazard(node: Node, types: Types) -> str | None:
    """What is wrong with giving its operands to `node`'s kernel; None if nothing is."""
    check = _CHECKS.get(node.operator)
    return None if check is None else check(node, types)


_CHECKS: Mapping[str, Check] = {}
