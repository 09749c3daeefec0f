"""What a job does twice it does alike, also where data draw random numbers: every way to sync gives the same digests,
and a difference is found in its tensor. Ranks that cannot agree fail."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sambasim.records.digests import read_recording, replica_file
from sambasim.report.compare import place
from sambasim.report.compare.recordings import compare_runs
from sambasim.report.tables import Row
from tests.faults.command import sambasim
from tests.mpi.training import TWO_NODES, WAYS, Trained, run_of, runs_of, train
from tests.support.mpi import SAMBASIM, Result, can_play_hosts, run_mpi
from tests.support.whole import is_whole, whole

pytestmark = pytest.mark.usefixtures("fresh")

STEPS = 3

# Its gradients are more than a device sync does all at once, so states are cut over replicas; BatchNorm has buffers.
APP = '''
import numpy as np, torch, torch.distributed as dist
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

class Table(nn.Module):
    """Its gradient is a scatter that adds: with several threads, in whatever order they arrive."""
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))
        self.head = nn.Linear(64, 4)
    def forward(self, index):
        return self.head(self.table[index].mean(1))

def samples(x=None, count=96):
    return TensorDataset(torch.randn(count, 64) if x is None else x, torch.arange(count) % 8)

def drawn():
    return samples(torch.tensor(np.random.randn(96, 64), dtype=torch.float32))

def by_rank():
    return samples(torch.full((96, 64), float(dist.get_rank())))

def indices():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, 64, (64, 4096), generator=generator), torch.arange(64) % 4)

class Own(Dataset):
    """Noise from a generator of its own, whose state goes on from sample to sample. It breaks after `most` samples."""
    def __init__(self, most=1000):
        self.generator, self.left = np.random.default_rng(0), most
    def __len__(self):
        return 96
    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the disk has gone")
        return torch.tensor(self.generator.standard_normal(64), dtype=torch.float32), index % 8
'''


def compile_in(folder: Path, where: Path, model: str, name: str, source: str) -> None:
    sets = (f"data.source=app.py:{source}", "loss.name=cross_entropy", "optimizer.name=adamw", "compile.opt_level=o1")
    flags = " ".join(f"--set {option}" for option in sets)
    command = f"compile app.py:{model} --pef-name {name} {flags} -b 4 --data-parallel -ws 2 --output-folder"
    sambasim([*shlex.split(command), str(folder / "out")], where).check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two PEFs, of which the second has another constant in its forward."""
    folder = tmp_path_factory.mktemp("digests")
    for name, scale, where in (("net", "1.5", folder), ("edited", "2.5", folder / "edited")):
        where.mkdir(exist_ok=True)  # one process would import an app.py that is written again once
        (where / "app.py").write_text(APP.replace("SCALE", scale), encoding="utf-8")
        compile_in(folder, where, "Net", name, "samples")
    return folder


def emulate(folder: Path, name: str, flags: str = "", *, pef: str = "net") -> Result:
    """A run of STEPS steps in two micro-steps each by two replicas, its digests in `folder/name`."""
    common = f"--steps {STEPS} --grad-accumulation-steps 2 --no-evaluate --json --emulate-replicas 2 --threads 1"
    return sambasim(shlex.split(f"run --pef {pef} {common} --record-digests {name} {flags}"), folder)


def recorded(folder: Path, name: str, flags: str = "", **chosen: Any) -> Row:
    """An emulation that ends well, compared with the run through the host."""
    emulate(folder, name, flags, **chosen).check()
    return compared(folder, name)


def compared(folder: Path, name: str) -> Row:
    return compare_runs(read_recording(folder / "host"), read_recording(folder / name))


DRAWING = {"drawn": {"source": "app.py:drawn"}, "own": {"source": "app.py:Own"}}


@pytest.fixture(scope="module")
def by_way(folder: Path) -> dict[str, Trained]:
    """Two replicas by each way, with the digests in the folder of its name, and once without; and with data that draw
    random numbers, which are called DATA WAY."""
    path = folder / "out" / "net" / "net.pef"
    asked: dict[str, Any] = {"steps": STEPS, "accumulation": 2}
    ways: dict[str, dict[str, Any]] = {"host": {}, **{way: dict(WAYS[way]) for way in ("device", "server")}}
    runs = [run_of(name, path, record_digests=name, **asked, **how) for name, how in ways.items()]
    runs.append(run_of("plain", path, **asked, **ways["device"]))
    for name, data in DRAWING.items():
        of_data = {"host": {}, "device": ways["device"], "emulated": {"emulate": 2}}
        runs += runs_of(name, path, of_data, data=data, **asked)
    found = train(2, runs, cwd=folder)
    if is_whole():
        found |= train(3, [run_of("servers", path, record_digests="servers", **asked, **WAYS["servers"])], cwd=folder)
    return found


@pytest.fixture(scope="module")
def host(folder: Path, by_way: dict[str, Trained]) -> Path:
    return folder / "host"


def test_every_way_has_the_same_digests(folder: Path, host: Path, by_way: dict[str, Trained]) -> None:
    recorded(folder, "emulated")
    for name in ("emulated", "device", "server", *(["servers"] if is_whole() else [])):
        found = compared(folder, name)
        assert found.equal, found.verdict
        assert (found.steps, found.replicas) == (STEPS, (0, 1))
        for replica in (0, 1):
            assert (host / replica_file(replica)).read_text() == (folder / name / replica_file(replica)).read_text()


def test_a_recorded_run_has_the_bits_and_the_bytes_of_one_that_is_not(by_way: dict[str, Trained]) -> None:
    assert by_way["plain"].outcome == by_way["device"].outcome
    assert by_way["plain"].summary.bytes == by_way["device"].summary.bytes


def test_data_that_draw_random_numbers_are_the_same_for_ranks_and_emulation(by_way: dict[str, Trained]) -> None:
    ends = {name: {by_way[f"{name} {way}"].outcome for way in ("host", "device", "emulated")} for name in DRAWING}
    assert {name: len(outcomes) for name, outcomes in ends.items()} == {"drawn": 1, "own": 1}
    assert ends["drawn"] != ends["own"]


def test_ranks_that_see_other_data_are_refused_and_do_not_wait_for_ever(folder: Path) -> None:
    result = run_mpi(2, [*SAMBASIM, "run", "--pef", "net", "--data", "app.py:by_rank"], cwd=folder, timeout=30)
    assert result.returncode == 2
    assert result.stderr.count("error[data] (every rank): data set: ") == 1
    assert result.stderr.count("app.py:by_rank with 96 samples to train, content ") == 2
    assert "give every rank the same whole data set" in result.stderr


@whole
def test_a_scatter_repeats_with_two_threads(folder: Path) -> None:
    compile_in(folder, folder, "Table", "table", "indices")
    run = shlex.split("run --json --steps 4 --pef table --threads 2 --emulate-replicas 2")
    assert len({sambasim(run, folder).summary.state_sha256 for _ in range(3)}) == 1


@whole
def test_all_ranks_take_the_same_number_of_threads(folder: Path) -> None:
    """Two nodes of unequal size would give their ranks unequal shares of the cores."""
    run, env = [*SAMBASIM, *shlex.split("run --json --steps 4 --pef net")], {**TWO_NODES, "OMP_NUM_THREADS": ""}
    real = run_mpi(3, run, cwd=folder, env=env).summary
    fixed = run_mpi(3, [*run, "--threads", str(real.threads)], cwd=folder, env=env)
    assert real.state_sha256 == fixed.summary.state_sha256


@whole
@pytest.mark.skipif(not can_play_hosts(), reason="it takes the privilege to change the host name of a process")
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_gradients_are_recorded_before_they_are_summed_or_rounded_in_place(folder: Path, wire: str) -> None:
    """As between two nodes of two ranks."""
    ways: dict[str, dict[str, Any]] = {"device": {"reduce_on_rdu": True}, "emulated": {"emulate": 4}}
    names = {way: f"{wire} {way}" for way in ways}
    path, asked = folder / "out" / "net" / "net.pef", dict[str, Any](steps=STEPS, wire=wire)
    train(
        4,
        [run_of(name, path, record_digests=name, **asked, **ways[way]) for way, name in names.items()],
        cwd=folder,
        hosts=2,
    )
    one, other = (read_recording(folder / name) for name in names.values())
    assert compare_runs(one, other).equal


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
    kinds = {int(number): kind for number, kind, _ in map(str.split, recording.run.sections)}
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
    assert place(found.first).startswith(f"step 1, replicas 0 and 1, section {found.first.section} FWD net__")


def test_only_the_steps_that_are_asked_for_are_recorded(folder: Path, host: Path) -> None:
    found = recorded(folder, "third", "--record-steps 3")
    lines = list(read_recording(folder / "third").steps(1))
    assert [(line.step, line.begins) for line in lines] == [(2, True), (3, False)]
    assert found.first is None
    assert found.steps == 1
    assert found.digests > 50
    late = emulate(folder, "late", "--record-steps 9-12")
    assert late.returncode == 2
    assert f"--record-steps 9-12: the run has {STEPS} steps" in late.stderr
    assert not (folder / "late").exists()


def test_a_run_that_dies_leaves_the_steps_that_it_did(folder: Path, host: Path) -> None:
    """Each replica takes 8 samples a step, and its data set breaks in the third."""
    data = "--data app.py:Own --set data.args.most=20"
    flags = f"run --pef net --steps {STEPS} --grad-accumulation-steps 2 --record-digests dead {data}"
    result = run_mpi(2, [*SAMBASIM, *shlex.split(flags)], cwd=folder, timeout=120)
    assert result.returncode == 2
    assert "the disk has gone" in result.stderr
    assert [line.step for line in read_recording(folder / "dead").steps(1)] == [0, 1, 2]
    compare = sambasim(["compare", "dead", "host"], folder)
    assert compare.returncode == 1
    assert f"A ends after step 2, and was to record up to step {STEPS}\n" in compare.stdout


def test_the_digests_of_an_earlier_part_of_a_run_are_kept(folder: Path, host: Path) -> None:
    recorded(folder, "first", "--checkpoint-dir saved --checkpoint-every 2")
    again = emulate(folder, "first", "--resume saved/step-0000000002")
    assert again.returncode == 2
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
