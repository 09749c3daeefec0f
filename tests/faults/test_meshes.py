"""Jobs whose replicas have several ranks end with an error that names coordinates."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.fault import dataset
from tests.support.mpi import SAMBASIM, Result, run_mpi
from tests.support.whole import whole_case

TIMEOUT_S = 2

_SAMPLE = """import time
self.seen = getattr(self, "seen", 0) + 1
if self.seen > 10 and torch.distributed.get_rank() == 1:
    {action}
return torch.randn(8), i % 3"""


def run(folder: Path, compiled: Mapping[str, bytes], ranks: int, pef: str, *flags: str) -> Result:
    (folder / f"{pef}.pef").write_bytes(compiled[pef])
    return run_mpi(ranks, [*SAMBASIM, "run", "--pef", f"{pef}.pef", *flags], cwd=folder, timeout=120)


def run_until(folder: Path, compiled: Mapping[str, bytes], pef: str, action: str, *flags: str) -> Result:
    """A run in whose midst rank 1 does `action`."""
    (folder / "net.py").write_text(dataset(_SAMPLE.format(action=action), 64))
    data = ("--data", "net.py:samples", "--no-evaluate", "--epochs", "1000", "--sync-timeout", str(TIMEOUT_S))
    return run(folder, compiled, 2, pef, *data, *flags)


@pytest.mark.parametrize(("pef", "axis"), [whole_case("cut", "tp"), ("stages", "pp")])
def test_a_rank_that_hangs_is_found_by_those_that_wait_within_a_section(
    pef: str, axis: str, tmp_path: Path, compiled: Mapping[str, bytes]
) -> None:
    result = run_until(tmp_path, compiled, pef, "time.sleep(3600)")
    assert result.returncode == 4, result.stderr
    assert re.search(rf"^error\[stall\] \(seen by rank 0 on \S+: {axis} 0\): rank 1 kept the", result.stderr, re.M)
    where = rf"where: rank 1 on \S+ \(process \d+; {axis} 1\): step \d+, reading data for .*net\.py:\d+ in __getitem__"
    assert re.search(where, result.stderr), result.stderr
    assert not list(tmp_path.rglob("*-ranks-*.txt"))


def test_the_rank_of_an_error_and_its_log_have_coordinates(tmp_path: Path, compiled: Mapping[str, bytes]) -> None:
    result = run_until(tmp_path, compiled, "stages", 'raise OSError("the disk is full")', "--log-dir", "logs")
    assert result.returncode == 2
    assert re.search(r"^error\[data\] \(rank 1 on \S+: pp 1\): .*the disk is full", result.stderr, re.M)
    assert "notice: rank 1 (local 1): pp 1 on" in result.stdout
    assert "start stages: rank 1 of 2, local rank 1: pp 1; sync" in (tmp_path / "logs" / "rank1.log").read_text()
