"""Two runs of the fault sweep; `make faults` does many."""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.sweep.__main__ import sweep
from tests.faults.sweep.case import cases
from tests.faults.sweep.inject import Fault, Moment
from tests.support.whole import is_whole

_DEFAULT = (17, 18)
"""Of the cases with seed 3, with two replicas: a rank is killed in a step, or terminated as it saves a checkpoint."""


@pytest.mark.timeout(900)
def test_runs_with_faults_end_as_promised_and_lose_nothing(tmp_path: Path) -> None:
    chosen = cases(30, seed=3) if is_whole() else [cases(19, seed=3)[number] for number in _DEFAULT]
    verdicts = sweep(chosen, tmp_path)
    assert [(str(verdict.case), verdict.problems, verdict.stderr) for verdict in verdicts if verdict.problems] == []
    assert any(verdict.hit for verdict in verdicts)


def test_the_sweep_injects_everything_equally_often() -> None:
    chosen = cases(150, seed=1)
    assert set(Counter(case.moment for case in chosen).values()) == {150 // len(Moment)}
    assert {case.fault for case in chosen} == set(Fault)
    assert {case.ranks for case in chosen} == {2, 4}
