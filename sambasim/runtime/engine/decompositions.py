"""Which operators inductor takes apart, to write C++ for them, and which stay the kernels that torch has."""

# What torch._inductor offers has no types.
# mypy: no-disallow-untyped-calls

from collections.abc import Callable
from functools import cache

import torch
from torch._ops import OpOverload

_KEPT = (torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default)
"""torch has them from oneDNN; inductor's C++ for them took two to three times as long on an Intel processor with
AVX-512, and as long on an AMD one."""


KEPT_TAG = "sambasim keeps " + " ".join(str(operator) for operator in _KEPT)
"""For the keys of inductor's caches, which do not tell by which table a graph was made simpler."""


@cache
def decompositions() -> dict[OpOverload, Callable[..., object]]:
    """What inductor replaces by simpler operators: its own table, without what is kept and without those that draw
    random numbers, as by its `fallback_random`. Importing it takes seconds.

    From then on, what is kept has a way through inductor in the whole process. A torch.compile of the user's own never
    comes to it: by inductor's own table, these operators are replaced before.
    """
    from torch._inductor.decomposition import decompositions as table
    from torch._inductor.lowering import make_fallback

    for kept in _KEPT:
        make_fallback(kept, warn=False, override_decomp=True)
    return {operator: simpler for operator, simpler in table.items() if operator not in _KEPT}
