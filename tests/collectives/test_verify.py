"""The rules of schedules, each broken once; the tests of `plan` show that no algorithm breaks one."""

import pytest

from sambasim.collectives.schedule import Algorithm, Phase, Round, Schedule, Transfer
from sambasim.collectives.verify import verify
from sambasim.errors import InternalError


def _schedule(*transfers: Transfer) -> Schedule:
    return Schedule(Algorithm.RING, 10, (0, 0, 0), (Round(Phase.REDUCE_SCATTER, transfers),))


@pytest.mark.parametrize(
    ("rule", "transfers"),
    [
        (1, [Transfer(1, 1, 0, 4, True)]),
        (1, [Transfer(0, 3, 0, 4, True)]),
        (1, [Transfer(-1, 0, 0, 4, True)]),
        (2, [Transfer(0, 1, 4, 4, True)]),
        (2, [Transfer(0, 1, 4, 11, True)]),
        (2, [Transfer(0, 1, -1, 4, True)]),
        (3, [Transfer(0, 1, 0, 4, False), Transfer(2, 1, 0, 4, False)]),
        (3, [Transfer(0, 1, 0, 4, True), Transfer(2, 1, 0, 4, False)]),
        (3, [Transfer(0, 1, 0, 4, True), Transfer(2, 1, 3, 5, True)]),
        (4, [Transfer(0, 1, 0, 4, False), Transfer(1, 2, 3, 5, True)]),
        (4, [Transfer(0, 1, 4, 5, False), Transfer(1, 2, 0, 9, True), Transfer(1, 0, 2, 3, True)]),
    ],
)
def test_a_broken_rule_is_named_with_its_round(rule: int, transfers: list[Transfer]) -> None:
    with pytest.raises(InternalError, match=f"rule {rule} of schedules is broken by ring among 3 ranks") as refusal:
        verify(_schedule(*transfers))
    assert refusal.value.where == "round 1, reduce-scatter"


@pytest.mark.parametrize(
    "transfers",
    [
        [Transfer(0, 1, 0, 4, True), Transfer(2, 1, 0, 4, True)],
        [Transfer(0, 1, 0, 4, True), Transfer(1, 0, 0, 4, True)],
        [Transfer(0, 1, 0, 4, False), Transfer(2, 1, 4, 6, True), Transfer(1, 2, 6, 8, False)],
        [Transfer(1, 0, 0, 4, False), Transfer(1, 2, 2, 6, False), Transfer(0, 1, 6, 8, False)],
    ],
)
def test_what_can_happen_at_once_is_allowed(transfers: list[Transfer]) -> None:
    verify(_schedule(*transfers))
