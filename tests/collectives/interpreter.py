"""A schedule carried out on plain lists, one for each rank: the judge of every algorithm.

The transfers of a round are carried out one after the other in a shuffled order, and what is stored lands at once. So a
schedule whose rounds depend on an order, or that reads in a round what the same round wrote, is found out.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from sambasim.collectives.schedule import Round, Schedule
from sambasim.collectives.tree import additions

T = TypeVar("T")


class TooEarly(Exception):
    """A transfer read what its own round had written."""


def carry_out(
    schedule: Schedule, operands: Sequence[Sequence[T]], add: Callable[[T, T], T], shuffle: Random
) -> tuple[list[list[T]], list[int]]:
    """What each rank holds after all rounds, and how many elements each rank was read for others."""
    held = [list(operand) for operand in operands]
    sent = [0] * schedule.world_size
    for round_ in schedule.rounds:
        _carry_out_round(round_, held, sent, add, shuffle)
    return held, sent


def _carry_out_round(
    round_: Round, held: list[list[T]], sent: list[int], add: Callable[[T, T], T], shuffle: Random
) -> None:
    before = [list(values) for values in held]
    arrived: dict[tuple[int, int], dict[int, T]] = {}  # target and element: what came to be added, by source
    for transfer in shuffle.sample(round_.transfers, len(round_.transfers)):
        for element in range(transfer.start, transfer.stop):
            value = held[transfer.source][element]
            if value != before[transfer.source][element]:
                raise TooEarly(transfer)
            sent[transfer.source] += 1
            if transfer.accumulate:
                arrived.setdefault((transfer.target, element), {})[transfer.source] = value
            else:
                held[transfer.target][element] = value
    for (target, element), terms in arrived.items():
        held[target][element] = _sum_by_tree({**terms, target: held[target][element]}, add)


def _sum_by_tree(terms: dict[int, T], add: Callable[[T, T], T]) -> T:
    """The sum of the terms, of which there is one for each rank, in the order of the tree over these ranks."""
    values = [terms[rank] for rank in sorted(terms)]
    for into, source in additions(len(values)):
        values[into] = add(values[into], values[source])
    return values[0]
