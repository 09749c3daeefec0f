"""Replicas of an app predict their shards, with a PEF for inference or for training: as PyTorch does, bit for bit."""

import re
import sys
from pathlib import Path

import pytest

from tests.apps.predicting import PEFS, SYNCS
from tests.samba.harness import batch_of, compiled, with_sgd
from tests.support.mpi import Result, run_job, run_mpi
from tests.support.whole import whole_case

SCRIPT = Path(__file__).with_name("predicting.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both PEFs, compiled with --data-parallel -ws 2."""
    folder = tmp_path_factory.mktemp("out")
    for name, (kind, takes) in PEFS.items():
        inference = name == "forward"
        model, optimizer = with_sgd(kind)
        made = model, None if inference else optimizer
        compiled(made, batch_of()[:takes], folder, name, data_parallel=True, world_size=2, inference=inference)
    return folder


def run(folder: Path, np: int, *mistake: str, check: tuple[str, ...] = ()) -> Result:
    argv = [sys.executable, "-m", "sambasim", *check, str(SCRIPT), str(folder), *mistake]
    return run_job(argv, cwd=folder, timeout=120) if np == 1 else run_mpi(np, argv, cwd=folder, timeout=120)


@pytest.mark.parametrize("np", [1, 2, whole_case(3)])
def test_replicas_predict_their_shards(folder: Path, np: int) -> None:
    """A PEF for inference needs as many replicas as it was compiled for where the app asks for data parallelism."""
    result = run(folder, np).check()
    few = "refused: this PEF was compiled for at least 2 replicas (-ws 2), and 1 replica was started"
    expected = [
        f"{pef} {len(flags)} {rank}: {few if np == 1 and flags and pef == 'forward' else 'predicted'}"
        for pef in PEFS
        for flags in SYNCS
        for rank in range(np)
    ]
    told = re.findall(r"(?:forward|step) \d \d: (?:predicted|refused: .* started)", result.stdout)  # ranks mix lines
    assert sorted(told) == sorted(expected)
    assert "notice: DP" not in result.stderr
    assert "summary" not in result.stderr


def test_replicas_that_predict_the_same_are_found(folder: Path) -> None:
    result = run(folder, 2, "same").check()
    assert "DP04: replicas 0 and 1 get the same samples, again in step 2" in result.stderr
    assert "predicting.py" in result.stderr
