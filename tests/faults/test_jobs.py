"""Bad input to real processes: alone, and as the ranks of a job under mpirun. It is reported once."""

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
    """`mpirun -np RANKS sambasim COMMAND`, in a folder with the PEFs and a sound net.py; the rest is as in `Fault`.

    One for each way of failing: at one rank, before MPI starts, on every rank alike, on rank 0 alone.
    """

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


_ON_RANK_1 = """self.seen = getattr(self, "seen", 0) + 1
if torch.distributed.get_rank() == 1 and self.seen > 20:
    {action}
return torch.randn(8), i % 3"""
"""In the third step of rank 1 or later."""


@pytest.mark.parametrize("sync", ["--reduce-on-rdu", whole_case("")])
@pytest.mark.parametrize(
    ("action", "flags", "told"),
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
        whole_case(
            "return torch.randn(8), 7",
            "",
            ("error[data] (rank 1 on ", "the samples hold values that the model cannot take", "went up to 2"),
        ),
        whole_case(
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
    ids=["shape", "values", "nan", "debug"],
)
def test_data_that_goes_bad_on_one_rank_in_the_middle_of_training_is_reported_once(
    action: str, flags: str, told: tuple[str, ...], sync: str, folder: Path
) -> None:
    getitem = _ON_RANK_1.format(action=f"open('failed_at', 'w').write(repr(time.time())); {action}")
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
        whole_case(TRAIN, ("a branch on the value of a tensor", "net.py:18: if h.sum() > 0:", "torch.where")),
    ],
)
def test_alone_only_the_error_is_printed(command: str, told: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(net("h = self.linear(x)\nif h.sum() > 0:\n    h = h * 2\nreturn h"))
    before = contents(tmp_path)
    result = run_job([*_SAMBASIM, *command.split()], cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"})
    _check(result, 2, told)
    assert result.stdout == ""
    check_left(tmp_path, before)


def test_an_internal_error_prints_its_traceback_for_the_bug_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def divide(*arguments: object) -> Callable[[], None]:
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("sambasim.options.compile.compile_options", divide)
    outcome = sambasim(["compile"], tmp_path)
    assert outcome.exit_code == 70
    assert "Traceback (most recent call last)" in outcome.stderr
    assert outcome.stderr.endswith("this is a bug in sambasim, please report it: of our own\n")
