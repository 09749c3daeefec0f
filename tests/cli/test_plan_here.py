"""`sambasim plan --here`: what it measures and prints, and what it refuses."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sambasim.cli.main import sambasim
from sambasim.errors import MachineError, OptionError, SambasimError
from sambasim.runtime.machine import launcher
from sambasim.runtime.measure import machine
from sambasim.runtime.measure.machine import Work
from sambasim.simulation.machine import Machine, PassTimes, Rates

CONFIG = str(Path(__file__).parents[2] / "configs" / "logistic_regression.toml")
ONLY = ("--only", "recompute=none", "--only", "samples=8,16", "--only", "tensor=none")


def plan(*arguments: str) -> str:
    return CliRunner().invoke(sambasim, ["plan", *arguments], catch_exceptions=False).stdout


def error(*arguments: str) -> SambasimError:
    with pytest.raises(SambasimError) as caught:
        plan(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("flags", "what", "remedy"),
    [
        (("--cluster", "sn30-8"), "--cluster is for devices, and --here plans for this machine", "leave out --cluster"),
        (("--nodes", "1"), "--nodes is for devices, and --here plans for this machine", "leave out --nodes"),
        (("--arch", "sn40l"), "--arch is for devices, and --here plans for this machine", "leave out --arch"),
        (("--only", "dtype=fp32,bf16"), "--here measures passes of one dtype", "--only dtype=fp32"),
        (
            ("--only", "samples=5", "--ranks", "1"),
            "no strategy of up to 1 rank gives a global batch of 32 with these values",
            "another --global-batch, or fewer --only",
        ),
    ],
)
def test_flags_that_do_not_go_together(flags: tuple[str, ...], what: str, remedy: str) -> None:
    refused = error(CONFIG, "--here", *flags)
    assert isinstance(refused, OptionError)
    assert (refused.what, refused.remedy) == (what, remedy)


def test_ranks_are_of_this_machine_and_at_least_one() -> None:
    refused = error(CONFIG, "--ranks", "2")
    assert (refused.what, refused.remedy) == ("--ranks is for this machine", "add --here, or give --nodes instead")
    result = CliRunner().invoke(sambasim, ["plan", CONFIG, "--here", "--ranks", "0"])
    assert result.exit_code == 2
    assert "0 is not in the range x>=1" in f"{result.output}{result.exception}"


def test_a_pef_has_one_batch_size() -> None:
    refused = error("net", "--here")
    assert refused.what == "--here measures passes of several batch sizes, and a PEF as net has one"
    assert refused.remedy == "plan the config or the model that it was compiled from"


def test_a_model_that_does_not_run_here_is_named_with_what_a_rank_said() -> None:
    refused = error(CONFIG, "--here", "--ranks", "1", "--global-batch", "4096", "--only", "samples=4096")
    assert isinstance(refused, MachineError)
    assert refused.what == (
        "the model does not run on this machine, with 1 rank: digits has 1,437 samples to train on, fewer than"
        " 1 replica × 4,096 samples"
    )
    assert refused.remedy == "a smaller --global-batch; sambasim compile and sambasim run say more"


def made_up(work_for: Callable[[int], Work], ranks: int, on_phase: Callable[[str], None]) -> Machine:
    """A machine on which every operator takes a millisecond."""
    (program, *_) = work_for(1).programs
    assert program.training is not None
    seconds = {node.name: 1e-3 for node in program.training.nodes}
    of_pass = PassTimes(program.batch_size, seconds, 0.0, 0.0, 0)
    return Machine(2, 1 << 34, 1e10, 1e11, 0.5, (Rates(1, 2, 1, 1, (of_pass,), 0.0, 0.0, 0.0, 1e9),))


def test_without_mpirun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "mpirun_here", lambda: None)
    monkeypatch.setattr(machine, "measure_machine", made_up)
    printed = plan(CONFIG, "--here", "--ranks", "4", "--global-batch", "16", *ONLY)
    words = " ".join(printed.split())
    assert "global batch 16 on up to 1 rank on this machine, 2 cores" in words
    assert "there is no mpirun, so one rank only: python -m pip install mpich" in words
    assert "dp 1, 16 samples × 1 pass" in words
    assert "other programs used 0.5 cores meanwhile, so times are too long: measure again" in words
    assert "RDU" not in words


def test_two_ranks_are_measured_and_each_strategy_predicted(tmp_path: Path) -> None:
    """One run, with all that it writes."""
    rows_file, config = tmp_path / "all.csv", tmp_path / "plan.toml"
    files = ("--all", str(rows_file), "--emit", str(config), "--output-folder", str(tmp_path))
    found: dict[str, Any] = json.loads(
        plan(CONFIG, "--here", "--ranks", "2", "--global-batch", "16", "--json", *ONLY, *files)
    )
    assert found["hardware"].startswith("up to 2 ranks on this machine, ")
    assert found["note"].startswith("the rates of this machine were measured")
    assert "all steps and their memory are predicted" in found["note"]
    rows = list(csv.DictReader(rows_file.read_text().splitlines()))
    priced = [row for row in rows if row["predicted_step_s"]]
    assert {row["rdus"] for row in priced} == {"1", "2"}
    for row in priced:
        terms = ("compute", "host", "messages", "bubble", "update", "sync")
        assert float(row["predicted_step_s"]) == pytest.approx(sum(float(row[f"predicted_{one}_s"]) for one in terms))
        assert 1e-5 < float(row["predicted_step_s"]) < 10
        assert float(row["memory_bytes"]) > 50 << 20, "no process with torch is smaller"
    assert "sambasim run" in config.read_text()
