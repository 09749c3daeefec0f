"""A checkpoint of any layout goes on as any other with the bits of an uninterrupted run, or says that it does not."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sambasim.compiler.front import build_model
from sambasim.data.datasets import open_source
from sambasim.options.run import RunOptions
from sambasim.pef import read
from sambasim.runtime.checkpoint.content import Checkpoint
from sambasim.runtime.checkpoint.saver import restore
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import assemble, set_up
from tests.faults.command import sambasim
from tests.mpi.bodies.train import Run
from tests.mpi.layouts import ADAMW, REPLICATED, UNCLIPPED, Layout
from tests.mpi.training import WAYS, Trained, run_of, train, train_here
from tests.support.examples import MICRO_BATCHES, VARIANTS, CompiledExample, compiled
from tests.support.mpi import RANKS, SAMBASIM, run_mpi
from tests.support.whole import is_whole, whole, whole_case

EPOCH = 3
"""How many steps make an epoch where each example is resumed."""

_STEP = "step-000000000"
STEPS, SAVED = 6, 4
"""With two micro-steps each, two or three replicas and batches of 4, both lie in the first epoch."""

RUN = ["run", "--threads", "1", "--no-evaluate"]


@pytest.fixture(scope="module")
def variants(examples: list[CompiledExample]) -> list[CompiledExample]:
    """What is resumed: by default, every example with one of its variants."""
    return examples if is_whole() else examples[:: VARIANTS + 1]


def resumed_runs(np: int, paths: Sequence[Path], folder: Path) -> list[Run]:
    """Each PEF by each way to sync, and once more from a checkpoint that another way has written.

    With accumulation and a schedule. The checkpoint lies in the middle of the first of two epochs.
    """
    pairs = {"device": ("mpi", "server"), "mpi": ("device",)} if np > 1 else {"mpi": ("mpi",)}
    runs = []
    for path in paths:
        data = {"source": "synthetic", "samples": EPOCH * 2 * read(path).program.batch_size * np + 1}
        asked: dict[str, Any] = {"accumulation": 2, "schedule": {"name": "cosine", "warmup_steps": 2}, "data": data}
        for way, others in pairs.items():
            whole = f"{path.stem} {way}"
            saves = {"dir": str(folder / whole), "every": "1", "keep": 5}
            runs.append(run_of(whole, path, steps=5, checkpoint=saves, **WAYS[way], **asked))
            for other in others:
                name = f"{whole} {other}"
                resumes = {"dir": str(folder / name), "resume": str(folder / whole / f"{_STEP}2"), "exact": True}
                runs.append(run_of(name, path, steps=5, checkpoint=resumes, **WAYS[other], **asked))
    return runs


def check_resumed(found: Mapping[str, Trained], folder: Path) -> None:
    """Runs end alike whether they were interrupted or not, and no two PEFs do."""
    ends: dict[str, object] = {}
    for name, run in found.items():
        pef, way, *by = name.split()
        assert ends.setdefault(pef, run.outcome) == run.outcome, name
        if by and by != ["server"]:  # which writes other shards
            # What a checkpoint holds has the buffers of every replica too, which no other digest covers.
            shards = [Checkpoint(folder / one / f"{_STEP}5").manifest.shards for one in (f"{pef} {way}", name)]
            whole, resumed = [[shard.sha256 for shard in one.values()] for one in shards]
            assert whole == resumed, name
    assert len(set(ends.values())) == len(ends), "they cannot all have been trained"


@pytest.mark.parametrize("np", [np if np == 2 else whole_case(np) for np in RANKS])
def test_every_example_goes_on_with_its_bits(np: int, variants: list[CompiledExample], tmp_path: Path) -> None:
    """Within an epoch, with accumulation and a schedule; each way to sync, from what another has written."""
    check_resumed(train(np, resumed_runs(np, [one.path for one in variants], tmp_path)), tmp_path)


class Part(NamedTuple):
    """A run of `layout` by so many processes: 1 is this one, and of fewer than ranks each runs a whole replica."""

    layout: Layout
    processes: int
    how: Mapping[str, Any] = {}

    def run(self, name: str, folder: Path, **asked: Any) -> Run:
        layout, how = self.layout, {**self.how, **asked}
        if layout.dp > 1 and self.processes == 1:
            how["emulate"] = layout.dp
        if 1 < self.processes < layout.ranks:
            how["one_process_per_replica"] = True
        passes = 1 if layout.pp > 1 else MICRO_BATCHES  # as many as the others
        return run_of(name, layout.compiled(folder), steps=4, accumulation=passes, evaluate=True, **how)


WORDS = "bert_of_many_words"
STAGES, CUT, PAIRS = Layout(WORDS, pp=2), Layout(WORDS, tp=2), Layout(WORDS, dp=2, pp=2)
SLICES, SCHEDULE = ("parallel.zero=3",), ("parallel.schedule=zb-h1",)
CHIPS = Layout("resnet", chips=2, others=(UNCLIPPED, REPLICATED))
OF_RESNET = Layout("resnet", pp=2, others=(UNCLIPPED, REPLICATED))
GPT_SLICES = Layout("char_gpt", dp=2, others=SLICES)
DEVICE = {"reduce_on_rdu": True}

GOES_ON: Mapping[str, tuple[Part, tuple[Part, ...]]] = {
    "stages": (Part(OF_RESNET, 2), (Part(OF_RESNET, 2), Part(OF_RESNET, 1), Part(OF_RESNET.replicas, 1))),
    "chips": (Part(CHIPS, 2), (Part(CHIPS, 2),)),
    "parts": (Part(Layout("digits", tp=2), 2), (Part(Layout("digits", tp=2), 2), Part(Layout("digits", tp=2), 1))),
    "slices": (Part(GPT_SLICES, 2), (Part(GPT_SLICES, 2), Part(GPT_SLICES.replicas, 2))),
    "tied stages": (Part(STAGES, 2), (Part(Layout(WORDS, pp=2, others=SCHEDULE), 2), Part(STAGES.replicas, 1))),
    "one rank": (Part(STAGES.replicas, 1), (Part(STAGES, 2),)),
    "stages of replicas": (Part(PAIRS, 4), (Part(Layout(WORDS, dp=2, others=SLICES), 2),)),
    "stages of parts": (Part(Layout(WORDS, pp=2, tp=2, others=("parallel.recompute=full",)), 1), (Part(CUT, 1),)),
    "an emulation": (Part(PAIRS, 1), (Part(PAIRS, 2),)),
    "whole replicas": (Part(PAIRS, 2), (Part(PAIRS, 4, DEVICE),)),
}
"""By name: what writes a checkpoint, and what goes on from it with the same bits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize("name", [name if name in ("stages", "chips") else whole_case(name) for name in GOES_ON])
def test_a_checkpoint_of_one_layout_goes_on_as_another(name: str, folder: Path, tmp_path: Path) -> None:
    """With the bits, the evaluation and the saved weights of the run that wrote it, which --exact promises."""
    writes, goes_on = GOES_ON[name]
    saves = {"dir": str(tmp_path / "saved"), "every": "2", "keep": 2}
    resumes = {"resume": str(tmp_path / "saved" / f"{_STEP}2"), "exact": True}
    jobs = {writes.processes: [writes.run("all", folder, checkpoint=saves, save=str(tmp_path / "all.safetensors"))]}
    for number, part in enumerate(goes_on):
        save = str(tmp_path / f"{number}.safetensors")
        jobs.setdefault(part.processes, []).append(part.run(f"rest {number}", folder, checkpoint=resumes, save=save))
    found: dict[str, Trained] = {}
    for processes, runs in jobs.items():
        found |= train(processes, runs) if processes > 1 else train_here(runs)
    weights = load_file(tmp_path / "all.safetensors")
    shapes = {one: tensor.shape for one, tensor in build_model(writes.layout.options(folder)).state_dict().items()}
    assert {one: tensor.shape for one, tensor in weights.items()} == {one: shapes[one] for one in weights}
    for number in range(len(goes_on)):
        rest, resumed = found[f"rest {number}"], load_file(tmp_path / f"{number}.safetensors")
        assert rest.outcome == found["all"].outcome, goes_on[number]
        assert not any("bits may differ" in line for line in rest.notices)
        assert weights.keys() == resumed.keys()
        assert all(weights[one].equal(resumed[one]) for one in weights)


@whole
def test_a_checkpoint_of_whole_weights_goes_on_with_cut_ones_nearly_alike(folder: Path, tmp_path: Path) -> None:
    saves = {"dir": str(tmp_path), "every": "2", "keep": 2}
    whole = train(2, [Part(STAGES, 2).run("whole", folder, checkpoint=saves)])["whole"]
    cut = train_here([Part(CUT, 1).run("cut", folder, checkpoint={"resume": str(tmp_path / f"{_STEP}2")})])["cut"]
    assert cut.summary.loss_last == pytest.approx(whole.summary.loss_last, rel=1e-4)
    assert any(line.startswith("changed since the checkpoint: n_chips = 2") for line in cut.notices)


@whole
def test_a_trace_of_whole_replicas_has_all_ranks(folder: Path, tmp_path: Path) -> None:
    train(2, [Part(PAIRS, 2).run("traced", folder, trace=str(tmp_path / "trace.json"))])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    titles = sorted(event["args"]["name"].partition(" as ")[0] for event in events if event["name"] == "process_name")
    assert titles == [f"rank {2 * dp + pp} (dp {dp}, pp {pp})" for dp in range(2) for pp in range(2)]


MEAN = "resnet__bn__running_mean"


def restored(pef: Path, checkpoint: Checkpoint) -> list[Tensor]:
    """By rank along dp: the running mean of two replicas of `pef` after `checkpoint` was restored."""
    options = RunOptions.model_validate({"pef": str(pef), "threads": 1, "emulate_replicas": 2})
    setup = set_up(pef, options, single_rank("here"))
    source = open_source(setup.resolved.data, tuple(input_specs(setup.program)))
    team = assemble(setup, [source] * len(setup.ranks), RunObserver())
    restore(setup, team, checkpoint)
    holders = [one for one in team.replicas if MEAN in one.memory.program.symbols]
    return [one.memory.tensor(MEAN).clone() for one in sorted(holders, key=lambda one: one.replica)]


def test_a_checkpoint_of_chips_goes_on_without_them_and_back(folder: Path, tmp_path: Path) -> None:
    """A replica goes on with the buffers of its first chip, and its chips with those of the replica. Steps count
    replicas, not chips."""
    cut = ("parallel.pipeline_stages=2", "parallel.micro_batches=2", *ADAMW, UNCLIPPED)
    chips, alone = CHIPS.compiled(folder), compiled("resnet", tmp_path, *cut, batch_size=CHIPS.batch_size)
    folders = {name: {"dir": str(tmp_path / name)} for name in ("chips", "alone")}
    resumed = {"resume": str(tmp_path / "chips" / f"{_STEP}1")}
    how: dict[str, Any] = {"emulate": 2, "accumulation": 1}
    found = train_here(
        [
            run_of("chips", chips, steps=1, checkpoint=folders["chips"], **how),
            run_of("alone", alone, steps=2, checkpoint=folders["alone"] | resumed, **how),
        ]
    )
    assert "changed since the checkpoint: replicas = 2 (checkpoint: 2 of 2 chips)" in found["alone"].notices
    assert found["alone"].summary.samples == 2 * found["chips"].summary.samples
    saved = Checkpoint(tmp_path / "chips" / f"{_STEP}1")
    means = {name: one for name, one in saved.tensors() if name.endswith(MEAN)}
    of_replica = [[means[f"replica {one}/{chip}{MEAN}"] for chip in ("", "chip 1/")] for one in range(2)]
    assert not of_replica[0][0].equal(of_replica[0][1])
    for pef, expected in ((chips, [*of_replica[0], *of_replica[1]]), (alone, [one[0] for one in of_replica])):
        assert all(map(torch.equal, restored(pef, saved), expected))
    saved = Checkpoint(tmp_path / "alone" / f"{_STEP}2")
    of_replica = [[one] * 2 for name, one in saved.tensors() if name.endswith(MEAN)]
    assert all(map(torch.equal, restored(chips, saved), [*of_replica[0], *of_replica[1]]))


@pytest.fixture(scope="module")
def pefs(examples: list[CompiledExample]) -> Mapping[str, CompiledExample]:
    """By example, trained by AdamW: digits has BatchNorm and dropout."""
    return {one.example: one for one in examples if one.optimizer == "adamw" and not one.clipped}


@whole
def test_by_gloo_without_a_promise_of_bits(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> None:
    """What it does promise: to say so, and the same end on all ranks."""
    path, from_there = pefs["digits"].path, f"saved/{_STEP}{SAVED}"
    saves = run_of("whole", path, steps=STEPS, checkpoint={"dir": "saved", "every": str(SAVED)})
    resumes = run_of("resumed", path, steps=STEPS, checkpoint={"resume": from_there}, host_sync="gloo")
    whole, resumed = train(3, [saves, resumes], cwd=tmp_path).values()
    assert any("from here on, the bits may differ from those of an uninterrupted" in one for one in resumed.notices)
    assert any("gloo" in reason for reason in resumed.summary.exempt_from_exactness)
    assert (resumed.summary.steps, resumed.summary.resumed_after_step) == (STEPS, SAVED)
    assert resumed.summary.loss_last == pytest.approx(whole.summary.loss_last, rel=1e-4)


def test_four_replicas_become_two(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> None:
    data = ["--data", "synthetic", "--set", "data.samples=437"]
    flags = [*RUN, "--pef", str(pefs["digits"].path), *data, "--checkpoint-dir", "saved"]
    sambasim([*flags, "--emulate-replicas", "4", "--steps", "10"], tmp_path)
    again = [*flags, "--epochs", "2", "--resume"]
    refused = sambasim([*again, "--emulate-replicas", "2", "--exact"], tmp_path)
    assert refused.returncode == 2
    assert "replicas = 2 (checkpoint: 4)" in refused.stderr
    result = run_mpi(2, [*SAMBASIM, *again], cwd=tmp_path).check()
    assert "notice: changed since the checkpoint: replicas = 2 (checkpoint: 4)" in result.stdout
    # 437 samples: 160 by ten steps of four replicas; of the other 277, two replicas make 34 steps of 8.
    assert "step 98/98" in result.stdout
