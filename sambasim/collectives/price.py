"""What a schedule is predicted to take, worked out from its rounds.

The model is that of the sources of `formulas`: a rank has one port, which sends one message and receives one at the
same time; so the messages a rank sends in one round follow each other, and so do those it receives. Then the rank adds
what came to be added. A round lasts as long as its busiest rank, and the next one starts when it is over. Where the
ranks of a node share one port to the network, each waits for the bytes of all. Nothing here is measured.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from sambasim.collectives.links import Links
from sambasim.collectives.schedule import Round, Schedule
from sambasim.errors import UserError


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds, by what they go to, along the busiest ranks of the rounds."""

    latency_s: float
    transfer_s: float
    addition_s: float

    @property
    def predicted_s(self) -> float:
        """The whole time."""
        return self.latency_s + self.transfer_s + self.addition_s


@dataclass(slots=True)
class _Load:
    """What one rank's port does in one direction in one round; the element counts are what crosses each link."""

    messages_within: int = 0
    numel_within: int = 0
    messages_between: int = 0
    numel_between: int = 0


@dataclass(slots=True)
class _Loads:
    """One direction of one round, by rank; and what goes through each node's port."""

    ranks: defaultdict[int, _Load] = field(default_factory=lambda: defaultdict(_Load))
    nodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def count(self, rank: int, node: int, other_node: int, numel: int) -> None:
        load = self.ranks[rank]
        if node == other_node:
            load.messages_within += 1
            load.numel_within += numel
        else:
            load.messages_between += 1
            load.numel_between += numel
            self.nodes[node] += numel


def price(schedule: Schedule, element_bytes: int, links: Links) -> Price:
    """What `schedule` is predicted to take on `links` with elements of `element_bytes` bytes.

    Raises UserError if element_bytes is not positive.
    """
    if element_bytes < 1:
        raise UserError(f"elements of {element_bytes} bytes", remedy="give 1 or more")
    prices = [_of_round(round_, schedule.node_of, element_bytes, links) for round_ in schedule.rounds]
    return Price(
        latency_s=sum(each.latency_s for each in prices),
        transfer_s=sum(each.transfer_s for each in prices),
        addition_s=sum(each.addition_s for each in prices),
    )


def _of_round(round_: Round, node_of: tuple[int, ...], element_bytes: int, links: Links) -> Price:
    """The price of the busiest rank."""
    sent, received = _Loads(), _Loads()
    added: defaultdict[int, int] = defaultdict(int)
    for transfer in round_.transfers:
        source_node, target_node = node_of[transfer.source], node_of[transfer.target]
        sent.count(transfer.source, source_node, target_node, transfer.numel)
        received.count(transfer.target, target_node, source_node, transfer.numel)
        if transfer.accumulate:
            added[transfer.target] += transfer.numel

    def of_load(rank: int, load: _Load, port_numel: int) -> Price:
        between = port_numel if links.shared_port and load.messages_between else load.numel_between
        return Price(
            load.messages_within * links.within.latency_s + load.messages_between * links.between.latency_s,
            element_bytes * load.numel_within * links.within.transfer_s_per_byte
            + element_bytes * between * links.between.transfer_s_per_byte,
            element_bytes * added[rank] * links.addition_s_per_byte,
        )

    return max(
        (
            of_load(rank, load, loads.nodes[node_of[rank]])
            for loads in (sent, received)
            for rank, load in loads.ranks.items()
        ),
        key=lambda each: each.predicted_s,
        default=Price(0.0, 0.0, 0.0),
    )
