"""Two runs of the fault sweep; `make faults` does many."""

from pathlib import Path

import pytest

from tests.faults.sweep import cases, sweep
from tests.support.whole import is_whole

_DEFAULT = (6, 25)
"""With two replicas, rank 1 is terminated in a step, or killed as it saves a checkpoint."""


@pytest.mark.timeout(900)
def test_runs_with_faults_end_as_promised_and_lose_nothing(tmp_path: Path) -> None:
    every = cases(30, seed=4)
    verdicts = sweep(every if is_whole() else [every[number] for number in _DEFAULT], tmp_path)
    assert [(str(verdict.case), verdict.problems, verdict.stderr) for verdict in verdicts if verdict.problems] == []
    assert any(verdict.hit for verdict in verdicts)
