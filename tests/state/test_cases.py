"""Every kind of model that once failed is equal to eager PyTorch, told, or refused with the right line and a remedy
that, applied, is equal."""

import pytest

# A module of cases adds them as it is imported.
from tests.state import counters, far, first_calls, fitting, messages, objects, process, remedies, tensors, wrongly  # noqa: F401
from tests.state.case import CASES, Case
from tests.state.play import complaints, play
from tests.support.whole import is_whole

CHOSEN = [one for one in CASES.values() if is_whole() or not one.whole]


@pytest.mark.parametrize("case", CHOSEN, ids=[case.name for case in CHOSEN])
def test_it_is_equal_told_or_refused(case: Case) -> None:
    found = play(case)
    assert not [*complaints(case, found)], str(found)
