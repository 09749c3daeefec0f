"""`sambasim bench collectives` where it is refused: flags, and one rank alone."""

from pathlib import Path

import pytest

from tests.faults.command import Outcome, sambasim


def run(folder: Path, *arguments: str) -> Outcome:
    return sambasim(["bench", "collectives", *arguments], folder)


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (["--min-bytes", "1K"], "--min-bytes: '1K' is not a size", '--min-bytes "64 KiB"'),
        (["--max-bytes", "9" * 5000], "is too large", '--max-bytes "64 KiB"'),
        (["--max-bytes", "0"], "--max-bytes: must be from 1 B to 1.0 TiB", "256 MiB"),
        (["--min-bytes", "2KiB", "--max-bytes", "1KiB"], "--min-bytes is more than --max-bytes", "--min-bytes"),
        (["--min-bytes", "1GiB"], "--max-bytes: they are 1.0 GiB and 256.0 MiB", "--max-bytes 1073741824"),
        (["--paths", "device,nccl"], "there is no path 'nccl'", "--paths device,gloo"),
        (["--paths", ","], "no path was named", "--paths device,gloo"),
        (["--plot", "sync.png"], "sync.png does not end in .svg", "--plot sync.svg"),
        (["--plot", "/proc/sync.svg"], "the plot cannot be written to /proc/sync.svg", "another place"),
    ],
)
def test_a_wrong_flag_is_refused_before_mpi_starts(
    tmp_path: Path, arguments: list[str], what: str, remedy: str
) -> None:
    result = run(tmp_path, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error[option]: ")
    assert what in result.stderr
    assert remedy in result.stderr.split("try:")[1]


def test_one_rank_has_nothing_to_sync(tmp_path: Path) -> None:
    result = run(tmp_path, "--max-bytes", "4KiB")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error[launch]: one rank alone has nothing to sync" in result.stderr
    assert "try:   mpirun -np 2 sambasim bench collectives --max-bytes 4KiB" in result.stderr
