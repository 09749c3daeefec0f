"""A disk that is full, at the start or in the middle of the work: one error, its exit code, and no partial file.

RLIMIT_FSIZE stands for the disk, because it needs no privilege: no file of this process may grow beyond it.
"""

import json
import resource
from pathlib import Path

from tests.faults.command import sambasim
from tests.faults.fault import TRAIN, check_message
from tests.support.mpi import SAMBASIM, Result, run_mpi
from tests.support.whole import whole

_STILL = {"PYTHONDONTWRITEBYTECODE": "1"}
_STEPS = "run --pef net --epochs 500 --no-evaluate"


def _limited(command: str, folder: Path, limit_bytes: int) -> Result:
    sambasim(["run", "--pef", "net", "--steps", "1"], folder)  # MPI makes files of its own when it starts
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        return sambasim(command, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@whole
def test_the_disk_fills_in_the_middle_of_the_metrics_or_a_log(folder: Path) -> None:
    says = "error[machine]: the {} cannot be written any more: File too large ... {}"
    result = _limited(f"{_STEPS} --metrics m.jsonl --save w.safetensors", folder, 20_001)
    check_message(result, says.format("metrics file m.jsonl", "free space"))
    lines = (folder / "m.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1)), "only whole lines are kept"
    assert 20 < len(lines) < 2000
    assert not (folder / "w.safetensors").exists()
    check_message(_limited(f"{_STEPS} --log-dir logs", folder, 20_001), says.format("log logs/rank0.log", "--log-dir"))
    text = (folder / "logs" / "rank0.log").read_text()
    assert text.endswith("\n")
    assert len(text) > 10_000


_WRITERS = (
    ("run --pef net --trace t.json", "error[machine]: the trace cannot be written to t.json ... --trace FILE"),
    (
        "run --pef net --save w.safetensors",
        "the weights cannot be written to w.safetensors ... File too large ... --save FILE",
    ),
    (
        "run --pef guess --inference --predictions p.safetensors",
        "the predictions cannot be written to p.safetensors ... File too large ... --predictions FILE",
    ),
    (TRAIN + " --pef-name new", "error[machine]: cannot write ... new.pef: File too large ... try:   free "),
)


def test_a_file_is_written_whole_or_not_at_all(folder: Path) -> None:
    (folder / "t.json").write_text("of an earlier run")
    before = _files(folder)
    for command, says in _WRITERS:
        check_message(_limited(command, folder, 100), says)
        assert _files(folder) == before
    assert (folder / "t.json").read_text() == "of an earlier run"


def test_a_log_that_one_rank_cannot_write_ends_the_job_once(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "rank1.log").symlink_to("/dev/full")
    command = [*SAMBASIM, "run", "--pef", "pair", "--log-dir", "logs", "--save", "w.safetensors"]
    result = run_mpi(2, command, cwd=folder, env=_STILL)
    says = "error[machine] (rank 1 on ... the log logs/rank1.log cannot be written any more: No space left"
    check_message(result, says)
    assert not (folder / "w.safetensors").exists()
