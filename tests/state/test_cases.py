"""Every kind of model that once failed is equal to eager PyTorch, told, or refused with the right line and a remedy
that, applied, is equal."""

import pytest

from tests.state.all_cases import CASES
from tests.state.case import Case
from tests.state.generated import generate
from tests.state.play import complaints, play
from tests.support.whole import is_whole

CHOSEN = [one for one in CASES.values() if is_whole() or not one.whole]


@pytest.mark.parametrize("case", CHOSEN, ids=[case.name for case in CHOSEN])
def test_it_is_equal_told_or_refused(case: Case) -> None:
    found = play(case)
    assert not [*complaints(case, found)], str(found)


@pytest.mark.parametrize("seed", range(500 if is_whole() else 6))
def test_a_net_composed_at_random_is_equal_or_refused(seed: int) -> None:
    case, made_of = generate(seed)
    found = play(case)
    assert not [*complaints(case, found)], f"{found}\n{made_of}"
