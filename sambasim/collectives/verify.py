"""What every schedule must keep, so that the transfers of a round can happen all at once and in any order.

1. A transfer goes from one rank of the world to another.
2. Its span is not empty and lies in the buffer.
3. What a round writes into one rank lies in disjoint spans, or in one span where every writer adds.
4. No rank stores, in a round, into what it sends in that round. (What it adds waits in scratch until all is sent.)
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from sambasim.collectives.schedule import Round, Schedule
from sambasim.collectives.slices import Slice
from sambasim.errors import InternalError


def verify(schedule: Schedule) -> None:
    """Raise InternalError naming the rule, the algorithm and the round if `schedule` breaks one of the rules."""
    for index, round_ in enumerate(schedule.rounds):
        rule = _broken(round_, schedule.world_size, schedule.numel)
        if rule:
            raise InternalError(
                f"rule {rule} of schedules is broken by {schedule.algorithm} among {schedule.world_size} ranks",
                where=f"round {index + 1}, {round_.phase}",
            )


def _broken(round_: Round, world_size: int, numel: int) -> int | None:
    """The number of the first rule that `round_` breaks."""
    stored: defaultdict[int, list[Slice]] = defaultdict(list)
    added: defaultdict[int, set[Slice]] = defaultdict(set)
    sent: defaultdict[int, set[Slice]] = defaultdict(set)
    for transfer in round_.transfers:
        source, target, span = transfer.source, transfer.target, (transfer.start, transfer.stop)
        if source == target or not (0 <= source < world_size and 0 <= target < world_size):
            return 1
        if not 0 <= transfer.start < transfer.stop <= numel:
            return 2
        sent[source].add(span)
        if transfer.accumulate:
            added[target].add(span)
        else:
            stored[target].append(span)
    if any(_overlap([*stored[target], *added[target]]) for target in {*stored, *added}):
        return 3
    if any(_overlap([*spans, *_union(sent[target])]) for target, spans in stored.items()):
        return 4
    return None


def _overlap(spans: Iterable[Slice]) -> bool:
    """Whether two of `spans` share an element."""
    return any(stop > start for (_, stop), (start, _) in pairwise(sorted(spans)))


def _union(spans: Iterable[Slice]) -> list[Slice]:
    """Disjoint spans with the elements of `spans`."""
    merged: list[Slice] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
