"""A small part of `make faults`: runs that are struck down at random moments, and what is left of them."""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.sweep.__main__ import sweep
from tests.faults.sweep.blows import Blow, Moment
from tests.faults.sweep.case import cases
from tests.support.whole import is_whole


@pytest.mark.timeout(900)
def test_runs_that_are_struck_end_as_promised_and_lose_nothing(tmp_path: Path) -> None:
    verdicts = sweep(cases(30 if is_whole() else 6, seed=3), tmp_path)
    assert [(str(verdict.case), verdict.faults, verdict.stderr) for verdict in verdicts if verdict.faults] == []
    assert any(verdict.struck for verdict in verdicts)


def test_the_sweep_does_everything_equally_often() -> None:
    chosen = cases(150, seed=1)
    assert set(Counter(case.moment for case in chosen).values()) == {150 // len(Moment)}
    assert {case.blow for case in chosen} == set(Blow)
    assert {case.ranks for case in chosen} == {2, 4}
