"""Bad input to real processes: alone, and as the ranks of a job under mpirun. It is reported once."""

import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.faults.command import sambasim
from tests.faults.fault import Compiled, Fault, check_left, check_message, contents, dataset, net, put, table
from tests.support.mpi import SAMBASIM, run_mpi
from tests.support.whole import whole_case

_END_S = 10.0
"""How long a job may live on after one of its ranks has failed."""


LAUNCHES: tuple[Fault, ...] = (
    *table(
        """
run --pef pair --host-sync parameter-server --parameter-servers 1
    error[launch] (every rank): 2 ranks were started, and --parameter-servers 1 leaves 1 for replicas, ...
    of which this PEF needs at least 2 (-ws 2) ...
    mpirun -np 3 sambasim run --pef pair --host-sync parameter-server --parameter-servers 1
run --pef shared --one-process-per-replica
    (every rank) ... shared splits its batch over 2 chips (dp 2) ... mpirun -np 4 sambasim run
""",
        ranks=2,
    ),
    Fault(
        "run --pef cut",
        "(every rank): 3 ranks were started, and a replica of this PEF has 2 (tp 2) ... mpirun -np 2 sambasim run",
        ranks=3,
    ),
    Fault(
        "run --pef pair --metrics net.py/m.jsonl --save w.safetensors",
        "error[option] (rank 0 on ... the metrics file cannot be written to net.py/m.jsonl ... --metrics FILE",
        net(),
        ranks=2,
    ),
)


@pytest.mark.parametrize("fault", LAUNCHES, ids=lambda fault: fault.says[:60])
def test_an_error_of_a_job_is_reported_once(fault: Fault, tmp_path: Path, compiled: Compiled) -> None:
    fault.check(tmp_path, compiled)


_ASSERTED = "too large ... asserting.py:20: assert h.abs().max() < 500, 'too large'"
_RAISED = "raise ValueError('large in the mean') ... asserting.py:21: if h.mean() > 1:"


@pytest.mark.parametrize(
    ("command", "says", "change", "ranks"),
    [
        ("asserting", _ASSERTED, "*= 1e4", 0),
        ("asserting", _RAISED, "= 30.0", 0),
        ("asserting --emulate-replicas 2", _ASSERTED, "*= 1e4", 0),
        whole_case("asserting --engine inductor", _ASSERTED, "*= 1e4", 0),
        ("asserting_stages", _ASSERTED, "*= 1e4", 2),
        whole_case("asserting_cut", _ASSERTED, "*= 1e4", 2),
    ],
)
def test_an_assertion_that_does_not_hold_ends_the_run(
    command: str, says: str, change: str, ranks: int, tmp_path: Path, compiled: Compiled
) -> None:
    """And a branch that raises."""
    samples = f"x = torch.randn(16, 8)\nx[9:] {change}\nreturn TensorDataset(x, torch.arange(16) % 3)"
    says = f"error[assertion] ... an assertion of the model does not hold: {says}"
    Fault(f"run --pef {command} --data net.py:samples", says, net(samples=samples), ranks=ranks).check(
        tmp_path, compiled
    )


@pytest.mark.parametrize("pef", ["asserting", "asserting_stages"])
def test_an_assertion_that_holds_is_passed(pef: str, tmp_path: Path, compiled: Compiled) -> None:
    put(tmp_path, compiled, pef)
    (tmp_path / "net.py").write_text(net(samples="return TensorDataset(torch.randn(16, 8), torch.arange(16) % 3)"))
    sambasim(["run", "--pef", pef, "--data", "net.py:samples"], tmp_path).check()


_ON_RANK_1 = """self.seen = getattr(self, "seen", 0) + 1
if torch.distributed.get_rank() == 1 and self.seen > 20:
    open("failed_at", "w").write(repr(time.time()))
    return torch.randn(9), i % 3
return torch.randn(8), i % 3"""
"""In the third step of rank 1 or later."""


@pytest.mark.parametrize("sync", ["--reduce-on-rdu", whole_case("")])
def test_samples_of_another_shape_on_one_rank_in_the_middle_of_training_are_reported_once(
    sync: str, folder: Path
) -> None:
    (folder / "net.py").write_text(f"import time\n\n{dataset(_ON_RANK_1, 64)}")
    before = contents(folder)
    command = f"run --pef pair --data net.py:samples --save w.safetensors --metrics m.jsonl {sync}"
    result = run_mpi(2, [*SAMBASIM, *command.split()], cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert time.time() - float((folder / "failed_at").read_text()) < _END_S
    says = (
        "error[data] (rank 1 on ... input x is float32[4, 9], and the PEF takes float32[4, 8] ... make the samples fit"
    )
    check_message(result, says)
    steps = [json.loads(line)["step"] for line in (folder / "m.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 2
    check_left(folder, before, may_leave=("failed_at", "m.jsonl"))


def test_an_internal_error_prints_its_traceback_for_the_bug_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Mock(side_effect=ZeroDivisionError("of our own"))
    monkeypatch.setattr("sambasim.options.compile.compile_options", failing)
    outcome = sambasim(["compile"], tmp_path)
    assert outcome.returncode == 70
    assert "Traceback (most recent call last)" in outcome.stderr
    assert outcome.stderr.endswith("this is a bug in sambasim, please report it: of our own\n")
