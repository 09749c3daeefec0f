"""What a message costs, by the alpha-beta-gamma model: latency, bytes on the wire, bytes added.

sambasim ships no figures for links: whoever asks for a price brings measured ones, or says that they are estimates.
Source of the model: Hockney, Parallel Computing 20(3), 1994; its gamma: Thakur, Rabenseifner, Gropp 2005.
"""

import math
from dataclasses import dataclass, fields

from sambasim.errors import UserError


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two ranks, the same in both directions at once.

    latency_s: alpha, seconds for a message of no bytes
    transfer_s_per_byte: beta, seconds for each byte; the inverse of the bandwidth

    Raises UserError if one is negative or not finite.
    """

    latency_s: float
    transfer_s_per_byte: float

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))


@dataclass(frozen=True, slots=True)
class Links:
    """All that a price depends on, besides the schedule.

    within, between: links of two ranks on one node, and on two nodes
    addition_s_per_byte: gamma, seconds to add one arrived byte to what a rank holds
    shared_port: whether the ranks of a node share one port to the network; otherwise each has its own

    Raises UserError if the addition's time is negative or not finite.
    """

    within: Link
    between: Link
    addition_s_per_byte: float
    shared_port: bool = True

    def __post_init__(self) -> None:
        _check("addition_s_per_byte", self.addition_s_per_byte)


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name} is {value}", remedy="give a finite number of seconds, 0 or more")
