"""The table of operators: which a PEF may hold, and what is known about each.

It is an allow-list, looked up by full name, and not a pattern: a PEF comes from a file, and torch has operators that
read files, mutate what they are given or hand out storage. To permit an operator, add its name to a group of
`operator_table`; a test holds every row against the schemas of the installed torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sambasim.ir.operator_flops import Flops, TypeOf
from sambasim.ir.operator_table import TABLE, OperatorKind

__all__ = ["OPERATORS", "Flops", "Operator", "OperatorKind", "TypeOf"]


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known about one operator.

    `flops(node, type_of)` is the number of floating-point operations that `node` does: see `operator_flops`.
    `draws_random_numbers` says that it advances torch's generator, or may: dropout at 0 does not.
    """

    kind: OperatorKind
    flops: Flops
    draws_random_numbers: bool = False


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {name: Operator(rows.kind, rows.flops, rows.draws_random_numbers) for rows in TABLE for name in rows.names}
)
"""By full name: `aten.addmm.default`, `opt.adamw`, `comm.reduce_scatter`."""
