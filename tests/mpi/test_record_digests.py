"""Recorded runs: every way to sync gives the same digests, and a difference is found in its tensor."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from sambasim.records.digests import read_recording, replica_file
from sambasim.records.metrics import SummaryRecord
from sambasim.report.compare import RunsCompared, place
from sambasim.report.compare.runs import compare_runs
from tests.faults.command import Outcome, sambasim
from tests.support.mpi import run_job, run_mpi
from tests.support.whole import is_whole, whole, whole_case

SAMBASIM = [sys.executable, "-m", "sambasim"]
STEPS = 3

# Its gradients are more than a device sync does all at once, so states are cut over replicas; BatchNorm has buffers.
APP = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.dropout = nn.Dropout(0.1)
        self.two = nn.Linear(256, 8)

    def forward(self, x):
        return self.two(self.dropout(torch.relu(self.norm(self.one(x))) * SCALE))

def samples():
    return TensorDataset(torch.randn(96, 64), torch.arange(96) % 8)

class Broken(Dataset):
    def __init__(self):
        self.taken = 0
    def __len__(self):
        return 96
    def __getitem__(self, index):
        self.taken += 1
        if self.taken > 20:
            raise RuntimeError("the disk has gone")
        return torch.ones(64), 1

def broken():
    return Broken()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two PEFs, of which the second has another constant in its forward."""
    folder = tmp_path_factory.mktemp("digests")
    flags = (
        "--set data.source=app.py:samples --set loss.name=cross_entropy --set optimizer.name=adamw -b 4 "
        "--data-parallel -ws 2"
    )
    for name, scale in (("net", "1.5"), ("edited", "2.5")):
        (folder / "app.py").write_text(APP.replace("SCALE", scale), encoding="utf-8")
        command = f"compile app.py:Net --pef-name {name} {flags} --set compile.opt_level=o1"
        run_job([*SAMBASIM, *shlex.split(command)], cwd=folder).check()  # one process would import app.py once
    return folder


def done(outcome: Outcome) -> Outcome:
    """The outcome of a command that ends well."""
    assert outcome.exit_code == 0, outcome.stderr
    return outcome


def record(folder: Path, name: str, flags: str = "", *, np: int = 2, pef: str = "net", threads: int = 1) -> Outcome:
    """A run of STEPS steps in two micro-steps each, its digests in `folder/name`."""
    command = (
        f"run --pef {pef} --steps {STEPS} --grad-accumulation-steps 2 --no-evaluate --json --threads {threads} "
        f"--record-digests {name} {flags}"
    )
    if np == 1:
        return sambasim(shlex.split(command), folder)
    result = run_mpi(np, [*SAMBASIM, *shlex.split(command)], cwd=folder, timeout=120)
    return Outcome(result.returncode, result.stdout, result.stderr)


def compared(folder: Path, a: str, b: str) -> RunsCompared:
    return compare_runs(read_recording(folder / a), read_recording(folder / b))


@pytest.fixture(scope="module")
def host(folder: Path) -> Path:
    """The recording that others are compared with."""
    done(record(folder, "host"))
    return folder / "host"


@pytest.mark.parametrize(
    ("flags", "np"),
    [
        ("--reduce-on-rdu", 2),
        ("--emulate-replicas 2", 1),
        whole_case("--host-sync parameter-server", 2),
        ("--host-sync parameter-server --parameter-servers 1", 3),
    ],
    ids=["device", "emulated", "server", "servers"],
)
def test_every_way_has_the_same_digests(flags: str, np: int, folder: Path, host: Path) -> None:
    name = flags.replace("-", "").replace(" ", "_")
    done(record(folder, name, flags, np=np))
    found = compared(folder, "host", name)
    assert found.alike, found.verdict
    assert (found.steps, found.replicas) == (STEPS, (0, 1))
    for replica in (0, 1):
        assert (host / replica_file(replica)).read_text() == (folder / name / replica_file(replica)).read_text()


def test_a_recorded_run_has_the_bits_and_the_bytes_of_one_that_is_not(folder: Path) -> None:
    command = f"run --pef net --steps {STEPS} --grad-accumulation-steps 2 --no-evaluate --json --threads 1"
    for way in ("", " --reduce-on-rdu") if is_whole() else (" --reduce-on-rdu",):
        plain = run_mpi(2, [*SAMBASIM, *shlex.split(command + way)], cwd=folder).check()
        before = SummaryRecord.model_validate_json(plain.stdout)
        after = SummaryRecord.model_validate_json(done(record(folder, "again", way)).stdout)
        for one in ("weights_sha256", "state_sha256", "loss_first", "loss_last", "bytes"):
            assert getattr(before, one) == getattr(after, one), (way, one)


def test_all_that_decides_a_step_is_recorded(host: Path) -> None:
    recording = read_recording(host)
    begins, *steps = recording.steps(0)
    assert begins.begins
    assert {one.what for one in begins.values} == {"parameter", "buffer", "state"}
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert {one.what for one in step.values} == {
            "input", "value", "loss", "gradient", "buffer", "parameter", "state",
        }  # fmt: skip
        assert {one.micro_step for one in step.values if one.what in ("input", "loss", "gradient")} == {0, 1}
    states = [one.name for one in steps[0].values if one.what == "state"]
    parameters = [one.name for one in steps[0].values if one.what == "parameter"]
    assert len(states) == 2 * len(parameters) == 2 * 6, "AdamW has two for each parameter, whole"
    assert "state" not in {one.what for line in recording.steps(1) for one in line.values}
    kinds = {section.number: section.kind for section in recording.run.sections}
    sections = {(one.what, kinds[one.section]) for one in steps[0].values if one.section is not None}
    assert {("loss", "FWD"), ("value", "FWD"), ("buffer", "FWD"), ("gradient", "BCKWD")} <= sections


def test_another_learning_rate_shows_in_a_parameter_of_the_first_step(folder: Path, host: Path) -> None:
    done(record(folder, "lr", "--lr 0.002 --emulate-replicas 2", np=1))
    found = compared(folder, "host", "lr")
    assert found.first is not None
    assert (found.first.step, found.first.replicas, found.first.what) == (1, (0, 1), "parameter")
    assert not found.not_comparable
    assert [one.name for one in found.asked_otherwise] == ["optimizer.lr"]
    assert found.losses[0].step == 2, "the loss of the first step is of the weights before it"


def test_another_constant_shows_in_its_section(folder: Path, host: Path) -> None:
    """Everything before the section that multiplies by the constant is alike."""
    done(record(folder, "edited_run", "--emulate-replicas 2", np=1, pef="edited"))
    found = compared(folder, "host", "edited_run")
    assert found.first is not None
    assert [one.name for one in found.not_comparable] == ["PEF"]
    graph = json.loads(done(sambasim(["inspect", "net", "--json"], folder)).stdout)["graphs"][0]
    lines = done(sambasim(["inspect", "net", "--section", str(found.first.section)], folder)).stdout
    assert "1.5" in lines
    assert graph["sections"][found.first.section]["kind"] == "FWD"
    assert (found.first.step, found.first.what, found.first.micro_step) == (1, "value", 0)
    assert place(found.first).startswith(f"step 1, replicas 0, 1, section {found.first.section} FWD net__")


def test_only_the_steps_that_are_asked_for_are_recorded(folder: Path, host: Path) -> None:
    done(record(folder, "third", "--record-steps 3 --emulate-replicas 2", np=1))
    lines = list(read_recording(folder / "third").steps(1))
    assert [(line.step, line.begins) for line in lines] == [(2, True), (3, False)]
    found = compared(folder, "third", "host")
    assert found.first is None
    assert found.steps == 1
    assert found.digests > 50


def test_a_run_that_dies_leaves_the_steps_that_it_did(folder: Path) -> None:
    """Each replica takes 8 samples a step, and its data set breaks in the third."""
    result = record(folder, "dead", "--data app.py:broken")
    assert result.exit_code == 2
    assert "the disk has gone" in result.stderr
    assert [line.step for line in read_recording(folder / "dead").steps(1)] == [0, 1, 2]
    compare = sambasim(["compare", "dead", "host"], folder)
    assert compare.exit_code == 1
    assert f"A ends after step 2, and was to record up to step {STEPS}\n" in compare.stdout


def test_steps_that_the_run_does_not_have_are_refused(folder: Path) -> None:
    result = record(folder, "late", "--record-steps 9-12 --emulate-replicas 2", np=1)
    assert result.exit_code == 2
    assert f"--record-steps 9-12: the run has {STEPS} steps" in result.stderr
    assert not (folder / "late").exists()


@whole
def test_compiled_sections_show_what_can_be_seen_and_say_so(folder: Path, host: Path) -> None:
    done(record(folder, "compiled", "--engine inductor --emulate-replicas 2", np=1))
    recording = read_recording(folder / "compiled")
    if recording.run.engine == "plain":
        pytest.skip("this machine has no compiler")
    assert recording.run.sees == "values that leave their unit of compiled sections"
    whats = {one.what for line in recording.steps(0) for one in line.values}
    assert {"input", "loss", "gradient", "buffer", "parameter", "state"} <= whats
    found = compared(folder, "host", "compiled")
    assert found.verdict.startswith("not comparable bit by bit: engine plain and inductor; they first differ at step 1")
