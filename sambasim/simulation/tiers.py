"""What lies in DDR where HBM is too small for all: first what is touched least, byte for byte.

    states of optimizers                               read and written once a step
    parameters, gradients, tensors between sections    touched more often: they follow where all states are out

Within each of the two, everything is out in the same part.
"""

from dataclasses import dataclass, replace

from sambasim.costs.fit import Need
from sambasim.hardware.budget import Budget


@dataclass(frozen=True, slots=True)
class Tiers:
    """The parts of the states, and of the rest, that lie in the slower memory; and the bytes that do."""

    states: float
    rest: float
    slow_bytes: int


def tiers_of(need: Need, states_bytes: int, budget: Budget) -> Tiers:
    """For a replica of which `states_bytes` are the states of optimizers."""
    if budget.behind is None or need.size_bytes <= budget.behind.fast_bytes:
        return Tiers(0.0, 0.0, 0)
    out_bytes = need.size_bytes - budget.behind.fast_bytes
    of_states = min(out_bytes, states_bytes)
    others_bytes = need.size_bytes - states_bytes
    rest = (out_bytes - of_states) / others_bytes if others_bytes else 0.0
    return Tiers(of_states / states_bytes if states_bytes else 0.0, rest, out_bytes)


def slowed(budget: Budget, part: float) -> Budget:
    """`budget` with the memory rate of a section that finds `part` of its bytes in the slower memory."""
    if budget.behind is None or not part:
        return budget
    s_per_byte = (1 - part) / budget.memory_bytes_per_s + part / budget.behind.bytes_per_s
    return replace(budget, memory_bytes_per_s=1 / s_per_byte)
