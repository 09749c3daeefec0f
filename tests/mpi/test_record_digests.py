"""Recorded runs: every way to sync gives the same digests, and a difference is found in its tensor."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sambasim.records.digests import read_recording, replica_file
from sambasim.report.compare import compare_runs, place
from sambasim.report.tables import Row
from tests.faults.command import Outcome, sambasim
from tests.mpi.training import WAYS, Trained, run_of, train
from tests.support.mpi import SAMBASIM, run_mpi
from tests.support.whole import is_whole, whole

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
    for name, scale, where in (("net", "1.5", folder), ("edited", "2.5", folder / "edited")):
        where.mkdir(exist_ok=True)  # one process would import an app.py that is written again once
        (where / "app.py").write_text(APP.replace("SCALE", scale), encoding="utf-8")
        command = f"compile app.py:Net --pef-name {name} {flags} --set compile.opt_level=o1 --output-folder"
        outcome = sambasim([*shlex.split(command), str(folder / "out")], where)
        assert outcome.exit_code == 0, outcome.stderr
    return folder


def emulate(folder: Path, name: str, flags: str = "", *, pef: str = "net", replicas: int = 2) -> Outcome:
    """A run of STEPS steps in two micro-steps each, its digests in `folder/name`."""
    common = f"--steps {STEPS} --grad-accumulation-steps 2 --no-evaluate --json --emulate-replicas {replicas}"
    threads = "" if "--threads" in flags else "--threads 1"
    return sambasim(shlex.split(f"run --pef {pef} {common} {threads} --record-digests {name} {flags}"), folder)


def recorded(folder: Path, name: str, flags: str = "", **chosen: Any) -> Row:
    """An emulation that ends well, compared with the run through the host."""
    outcome = emulate(folder, name, flags, **chosen)
    assert outcome.exit_code == 0, outcome.stderr
    return compared(folder, "host", name)


def compared(folder: Path, a: str, b: str) -> Row:
    return compare_runs(read_recording(folder / a), read_recording(folder / b))


def train_in(folder: Path, np: int, **ways: Mapping[str, Any]) -> dict[str, Trained]:
    """Two replicas by each way, with the digests in the folder of its name unless it is `plain`."""
    path = folder / "out" / "net" / "net.pef"
    digests = {name: None if name == "plain" else name for name in ways}
    runs = [run_of(n, path, steps=STEPS, accumulation=2, record_digests=digests[n], **how) for n, how in ways.items()]
    return train(np, runs, cwd=folder)


@pytest.fixture(scope="module")
def by_way(folder: Path) -> dict[str, Trained]:
    ways = {name: WAYS[name] for name in ("device", "server")}
    found = train_in(folder, 2, host={}, plain=WAYS["device"], **ways)
    return found | train_in(folder, 3, servers=WAYS["servers"]) if is_whole() else found


@pytest.fixture(scope="module")
def host(folder: Path, by_way: dict[str, Trained]) -> Path:
    return folder / "host"


def test_every_way_has_the_same_digests(folder: Path, host: Path, by_way: dict[str, Trained]) -> None:
    assert recorded(folder, "emulated").equal
    for name in ("emulated", *(way for way in by_way if way not in ("host", "plain"))):
        found = compared(folder, "host", name)
        assert found.equal, found.verdict
        assert (found.steps, found.replicas) == (STEPS, (0, 1))
        for replica in (0, 1):
            assert (host / replica_file(replica)).read_text() == (folder / name / replica_file(replica)).read_text()


def test_a_recorded_run_has_the_bits_and_the_bytes_of_one_that_is_not(by_way: dict[str, Trained]) -> None:
    assert by_way["plain"].outcome == by_way["device"].outcome
    assert by_way["plain"].summary.bytes == by_way["device"].summary.bytes


def test_all_that_decides_a_step_is_recorded(host: Path) -> None:
    recording = read_recording(host)
    begins, *steps = recording.steps(0)
    assert begins.begins
    assert {one.what for one in begins.values} == {"parameter", "buffer", "state"}
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        whats = {"input", "value", "loss", "gradient", "buffer", "parameter", "state"}
        assert {one.what for one in step.values} == whats
        assert {one.micro_step for one in step.values if one.what in ("input", "loss", "gradient")} == {0, 1}
    states = [one.name for one in steps[0].values if one.what == "state"]
    parameters = [one.name for one in steps[0].values if one.what == "parameter"]
    assert len(states) == 2 * len(parameters) == 2 * 6, "AdamW has two for each parameter, whole"
    assert "state" not in {one.what for line in recording.steps(1) for one in line.values}
    kinds = {section.number: section.kind for section in recording.run.sections}
    sections = {(one.what, kinds[one.section]) for one in steps[0].values if one.section is not None}
    assert {("loss", "FWD"), ("value", "FWD"), ("buffer", "FWD"), ("gradient", "BCKWD")} <= sections
    lines = [next(line for line in recording.steps(replica) if line.step == 1) for replica in (0, 1)]
    first, second = ({(one.what, one.name, one.micro_step): one.digest for one in line.values} for line in lines)
    apart = {what for (what, name, micro), digest in first.items() if second.get((what, name, micro)) != digest}
    assert {"input", "gradient", "loss", "buffer"} <= apart, "replicas have batches of their own"
    assert "parameter" not in apart


def test_another_learning_rate_shows_in_a_parameter_of_the_first_step(folder: Path, host: Path) -> None:
    found = recorded(folder, "lr", "--lr 0.002")
    assert found.first is not None
    assert (found.first.step, found.first.replicas, found.first.what) == (1, (0, 1), "parameter")
    assert not found.not_comparable
    assert [one.name for one in found.other_options] == ["optimizer.lr"]
    assert found.losses[0].step == 2, "the loss of the first step is of the weights before it"


def test_another_constant_shows_in_its_section(folder: Path, host: Path) -> None:
    """Everything before the section that multiplies by the constant is equal."""
    found = recorded(folder, "edited_run", pef="edited")
    assert found.first is not None
    assert [one.name for one in found.not_comparable] == ["PEF"]
    graph = json.loads(sambasim(["inspect", "net", "--json"], folder).stdout)["graphs"][0]
    assert "1.5" in sambasim(["inspect", "net", "--section", str(found.first.section)], folder).stdout
    assert graph["sections"][found.first.section]["kind"] == "FWD"
    assert (found.first.step, found.first.what, found.first.micro_step) == (1, "value", 0)
    assert place(found.first).startswith(f"step 1, replicas 0, 1, section {found.first.section} FWD net__")


def test_only_the_steps_that_are_asked_for_are_recorded(folder: Path, host: Path) -> None:
    found = recorded(folder, "third", "--record-steps 3")
    lines = list(read_recording(folder / "third").steps(1))
    assert [(line.step, line.begins) for line in lines] == [(2, True), (3, False)]
    assert found.first is None
    assert found.steps == 1
    assert found.digests > 50
    late = emulate(folder, "late", "--record-steps 9-12")
    assert late.exit_code == 2
    assert f"--record-steps 9-12: the run has {STEPS} steps" in late.stderr
    assert not (folder / "late").exists()


def test_a_run_that_dies_leaves_the_steps_that_it_did(folder: Path, host: Path) -> None:
    """Each replica takes 8 samples a step, and its data set breaks in the third."""
    flags = f"run --pef net --steps {STEPS} --grad-accumulation-steps 2 --record-digests dead --data app.py:broken"
    result = run_mpi(2, [*SAMBASIM, *shlex.split(flags)], cwd=folder, timeout=120)
    assert result.returncode == 2
    assert "the disk has gone" in result.stderr
    assert [line.step for line in read_recording(folder / "dead").steps(1)] == [0, 1, 2]
    compare = sambasim(["compare", "dead", "host"], folder)
    assert compare.exit_code == 1
    assert f"A ends after step 2, and was to record up to step {STEPS}\n" in compare.stdout


def test_the_digests_of_an_earlier_part_of_a_run_are_kept(folder: Path, host: Path) -> None:
    recorded(folder, "first", "--checkpoint-dir saved --checkpoint-every 2")
    again = emulate(folder, "first", "--resume saved/step-0000000002")
    assert again.exit_code == 2
    assert "first holds the digests of an earlier part of the run" in again.stderr


@whole
def test_compiled_sections_show_what_can_be_seen_and_say_so(folder: Path, host: Path) -> None:
    found = recorded(folder, "compiled", "--engine inductor")
    recording = read_recording(folder / "compiled")
    if recording.run.engine == "plain":
        pytest.skip("this machine has no compiler")
    assert recording.run.sees == "values that leave their unit of compiled sections"
    whats = {one.what for line in recording.steps(0) for one in line.values}
    assert {"input", "loss", "gradient", "buffer", "parameter", "state"} <= whats
    assert found.verdict.startswith("not comparable bit by bit: engine plain and inductor; they first differ at step 1")
