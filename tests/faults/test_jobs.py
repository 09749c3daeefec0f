"""Bad input to real processes: alone, and as the ranks of a job under mpirun."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.command import sambasim
from tests.faults.fault import assert_told, check_form, check_left, contents, message_of
from tests.faults.texts import TRAIN, dataset, net
from tests.support.mpi import Result, run_job, run_mpi
from tests.support.whole import whole_case

_SAMBASIM = (sys.executable, "-m", "sambasim")
_END_S = 10.0
"""How long a job may live on after one of its ranks has failed."""


@dataclass(frozen=True, slots=True)
class JobFault:
    """`mpirun -np RANKS sambasim COMMAND`, in a folder with the PEFs and a sound net.py; the rest is as in `Fault`."""

    name: str
    ranks: int
    command: str
    exit_code: int
    told: tuple[str, ...]


JOBS = (
    JobFault(
        "fewer ranks than replicas",
        1,
        "run --pef pair --save w.safetensors",
        2,
        ("error[launch]: ", "at least 2 replicas (-ws 2), and 1 was started", "mpirun -np 2 sambasim run --pef pair"),
    ),
    JobFault(
        "several ranks of a PEF for one",
        3,
        "run --pef net",
        2,
        (
            "error[launch] (every rank): 3 were started, but this PEF has no REDUCE and GATHER sections",
            "compile it with --data-parallel -ws 3, or run it alone: sambasim run --pef net",
        ),
    ),
    JobFault(
        "an emulation by several ranks",
        2,
        "run --pef pair --emulate-replicas 2",
        2,
        ("(every rank): --emulate-replicas 2 plays all replicas in one process, and 2 were started", "without mpirun"),
    ),
    JobFault(
        "an unknown flag",
        2,
        "run --pef pair --reduce-on-rdus",
        2,
        ("error[usage]: No such option '--reduce-on-rdus'", "sambasim run --help"),
    ),
    JobFault(
        "no PEF",
        2,
        "run --pef pare",
        2,
        ("error[option] (every rank): there is no PEF 'pare'", "looked for pare (not there)", "pair"),
    ),
    JobFault(
        "servers that leave too few replicas",
        2,
        "run --pef pair --host-sync parameter-server --parameter-servers 1",
        2,
        (
            "error[launch] (every rank): 2 ranks were started, and --parameter-servers 1 leaves 1 for replicas, ",
            "of which this PEF needs at least 2 (-ws 2)",
            "mpirun -np 3 sambasim run --pef pair --host-sync parameter-server --parameter-servers 1",
        ),
    ),
    JobFault(
        "metrics that rank 0 cannot write",
        2,
        "run --pef pair --metrics net.py/m.jsonl --save w.safetensors",
        2,
        ("error[option] (rank 0 on ", "the metrics file cannot be written to net.py/m.jsonl", "--metrics FILE"),
    ),
    JobFault(
        "too few samples for all ranks",
        2,
        "run --pef pair --data net.py:samples --grad-accumulation-steps 3",
        2,
        (
            "error[data] (every rank): the training data has 16 samples, but one step takes 24: "
            "batch 4 × 3 accumulation steps × 2 replicas",
            "fewer replicas",
        ),
    ),
)


def _check(result: Result, exit_code: int, told: tuple[str, ...]) -> None:
    message = message_of(result.stderr)
    assert_told(message, told)
    check_form(message, result.stdout + result.stderr)
    assert result.returncode == exit_code, message


@pytest.mark.parametrize("fault", JOBS, ids=lambda fault: fault.name)
def test_a_job_is_refused_once(fault: JobFault, folder: Path) -> None:
    before = contents(folder)
    result = run_mpi(
        fault.ranks, [*_SAMBASIM, *fault.command.split()], cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"}
    )
    _check(result, fault.exit_code, fault.told)
    check_left(folder, before)


_ON_RANK_1 = """if torch.distributed.get_rank() == 1 and i > 8:
    open("failed_at", "w").write(repr(time.time()))
    raise OSError("the disk of this host is full")
return torch.randn(8), i % 3"""


def test_a_failure_of_one_rank_ends_the_job_and_is_told_by_rank(folder: Path) -> None:
    (folder / "net.py").write_text(f"import time\n\n{dataset(_ON_RANK_1, 64)}")
    before = contents(folder)
    command = [*_SAMBASIM, "run", "--pef", "pair", "--data", "net.py:samples", "--save", "w.safetensors"]
    result = run_mpi(2, [*command, "--metrics", "m.jsonl"], cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"})
    lived_on_s = time.time() - float((folder / "failed_at").read_text())
    assert lived_on_s < _END_S
    assert result.stdout.splitlines()[1].startswith("pair: ")
    _check(
        result,
        2,
        ("error[data] (rank 1 on ", "raised OSError: the disk of this host is full", "net.py:16: raise OSError"),
    )
    check_left(folder, before, may_leave=("failed_at", "m.jsonl"))


_LATE_ON_RANK_1 = """self.seen = getattr(self, "seen", 0) + 1
if torch.distributed.get_rank() == 1 and self.seen > 20:
    {deed}
return torch.randn(8), i % 3"""
"""Rank 1 is in its third step or later, and nothing was wrong before."""


@pytest.mark.parametrize("sync", ["--reduce-on-rdu", whole_case("")])
@pytest.mark.parametrize(
    ("deed", "flags", "told"),
    [
        (
            "return torch.randn(9), i % 3",
            "",
            (
                "error[data] (rank 1 on ",
                "input x is float32[4, 9], and the PEF takes float32[4, 8]",
                "make the samples fit",
            ),
        ),
        (
            "return torch.arange(8), i % 3",
            "",
            (
                "error[data] (rank 1 on ",
                "input x is int64[4, 8], and the PEF takes float32[4, 8]",
                "make the samples fit",
            ),
        ),
        (
            "return torch.randn(8), 7",
            "",
            ("error[data] (rank 1 on ", "the samples hold values that the model cannot take", "went up to 2"),
        ),
        (
            "return torch.full((8,), torch.nan), i % 3",
            "",
            ("error[numerics] (every rank): the loss of step ", "nan on replica 1 of 2", "mpirun -np 2 sambasim run "),
        ),
        (
            "return torch.full((8,), torch.inf), i % 3",
            "--debug-numerics",
            ("error[numerics] (rank 1 on ", "the input x of the batch of replica 1 holds inf (sample", "32 elements"),
        ),
    ],
    ids=["shape", "dtype", "values", "nan", "debug"],
)
def test_data_that_goes_bad_on_one_rank_in_the_middle_of_training_is_told_once(
    deed: str, flags: str, told: tuple[str, ...], sync: str, folder: Path
) -> None:
    getitem = _LATE_ON_RANK_1.format(deed=f"open('failed_at', 'w').write(repr(time.time())); {deed}")
    (folder / "net.py").write_text(f"import time\n\n{dataset(getitem, 64)}")
    before = contents(folder)
    command = f"run --pef pair --data net.py:samples --save w.safetensors --metrics m.jsonl {flags} {sync}"
    result = run_mpi(2, [*_SAMBASIM, *command.split()], cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert time.time() - float((folder / "failed_at").read_text()) < _END_S
    _check(result, 2, told)
    steps = [json.loads(line)["step"] for line in (folder / "m.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 2
    check_left(folder, before, may_leave=("failed_at", "m.jsonl"))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("compile --data-paralel", ("error[usage]: No such option '--data-paralel'", "sambasim compile --help")),
        (TRAIN, ("a branch on the value of a tensor", "net.py:18: if h.sum() > 0:", "torch.where")),
    ],
)
def test_alone_nothing_but_the_error_is_said(command: str, told: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(net("h = self.linear(x)\nif h.sum() > 0:\n    h = h * 2\nreturn h"))
    before = contents(tmp_path)
    result = run_job([*_SAMBASIM, *command.split()], cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"})
    _check(result, 2, told)
    assert result.stdout == ""
    check_left(tmp_path, before)


def test_a_mistake_of_our_own_shows_its_traceback_for_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def divide(*arguments: object) -> Callable[[], None]:
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("sambasim.options.compile.compile_options", divide)
    outcome = sambasim(["compile"], tmp_path)
    assert outcome.exit_code == 70
    assert "Traceback (most recent call last)" in outcome.stderr
    assert outcome.stderr.endswith("this is a mistake of sambasim's own, please report it: of our own\n")
