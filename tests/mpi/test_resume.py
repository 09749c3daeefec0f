"""A resumed run has the bits of an uninterrupted one, by every way to sync, and whatever else may differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sambasim.options.run import RunOptions
from sambasim.pef import peek
from sambasim.records.digests import read_recording
from sambasim.records.metrics import SummaryRecord
from sambasim.report.compare.runs import compare_runs
from sambasim.runtime.checkpoint.content import check
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.run_observer import RunObserver, RunObservers
from sambasim.runtime.run.setup import set_up
from tests.faults.command import sambasim
from tests.mpi.bodies.train import Run
from tests.mpi.training import WAYS, Trained, run_of, train
from tests.support.examples import VARIANTS, CompiledExample
from tests.support.mpi import RANKS, SAMBASIM, run_mpi
from tests.support.whole import is_whole, whole, whole_case

EPOCH = 3
"""How many steps make an epoch where each example is resumed."""

_STEP = "step-000000000"
DRAWING = """
import random

import numpy as np
import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.rand(1, 8, 8) + float(np.random.rand()) + random.random(), index % 10


def samples():
    return Samples()
"""
"""Every sample is drawn anew each time, from all three generators."""

STEPS, SAVED = 6, 4
"""With two micro-steps each, two or three replicas and batches of 4, both lie in the first epoch."""

RUN = ["run", "--threads", "1", "--no-evaluate"]


@pytest.fixture(scope="module")
def compiled(examples: list[CompiledExample]) -> list[CompiledExample]:
    """What is resumed: by default, every example with one of its variants."""
    return examples if is_whole() else examples[:: VARIANTS + 1]


def resumed_runs(np: int, paths: Sequence[Path], folder: Path) -> list[Run]:
    """Each PEF by each way to sync, and once more from a checkpoint that another way has written.

    With accumulation and a schedule. The checkpoint lies in the middle of the first of two epochs.
    """
    pairs = {"device": ("mpi", "server"), "mpi": ("device",)} if np > 1 else {"mpi": ("mpi",)}
    runs = []
    for path in paths:
        data = {"source": "synthetic", "samples": EPOCH * 2 * peek(path).batch_size * np + 1}
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
            shards = [check(folder / one / f"{_STEP}5").manifest.shards for one in (f"{pef} {way}", name)]
            whole, resumed = [[shard.sha256 for shard in one.values()] for one in shards]
            assert whole == resumed, name
    assert len(set(ends.values())) == len(ends), "they cannot all have been trained"


@pytest.mark.parametrize("np", [np if np == 2 else whole_case(np) for np in RANKS])
def test_every_example_goes_on_with_its_bits(np: int, compiled: list[CompiledExample], tmp_path: Path) -> None:
    """Within an epoch, with accumulation and a schedule; each way to sync, from what another has written."""
    check_resumed(train(np, resumed_runs(np, [one.path for one in compiled], tmp_path)), tmp_path)


@pytest.fixture(scope="module")
def pefs(examples: list[CompiledExample]) -> Mapping[str, CompiledExample]:
    """By example, trained by AdamW: digits has BatchNorm and dropout."""
    return {one.example: one for one in examples if one.optimizer == "adamw" and not one.clipped}


@whole
def test_with_another_number_of_data_workers_step_by_step(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)

    def run(name: str, workers: int, checkpoint: Mapping[str, object]) -> Run:
        data = {"source": "drawing.py:samples", "workers": workers}
        asked: dict[str, Any] = {"data": data, "record_digests": name, "checkpoint": checkpoint}
        return run_of(name, pefs["digits"].path, steps=STEPS, accumulation=2, **asked)

    saved = run("whole", 1, {"dir": "saved", "every": str(SAVED)})
    rest = run("rest", 2, {"resume": f"saved/{_STEP}{SAVED}", "exact": True})
    whole, resumed = train(2, [saved, rest], cwd=tmp_path).values()
    assert resumed.summary.resumed_after_step == SAVED
    assert resumed.outcome == whole.outcome
    found = compare_runs(read_recording(tmp_path / "whole"), read_recording(tmp_path / "rest"))
    assert found.equal, found.verdict
    assert (found.steps, found.replicas) == (STEPS - SAVED, (0, 1))
    assert sambasim(["compare", "whole", "rest"], tmp_path).exit_code == 0


def overrides(steps: int) -> dict[str, object]:
    schedule = {"name": "constant"}
    return {"training": {"steps": steps, "accumulation_steps": 2, "evaluate": False, "schedule": schedule}}


def emulate(path: Path, *listeners: RunObserver, **asked: object) -> SummaryRecord:
    given = {"pef": str(path), "threads": 1, "emulate_replicas": 2, "overrides": overrides(STEPS), **asked}
    return TrainingJob(
        set_up(path, RunOptions.model_validate(given), single_rank("here")), RunObservers(listeners)
    ).run()


@whole
def test_by_gloo_without_a_promise_of_bits(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> None:
    """What it does promise: to say so, to refuse --exact where the bits were others', and the same end on all ranks."""
    path, from_there = pefs["digits"].path, f"saved/{_STEP}{SAVED}"
    saves = run_of("whole", path, steps=STEPS, checkpoint={"dir": "saved", "every": str(SAVED)})
    resumes = run_of("resumed", path, steps=STEPS, checkpoint={"resume": from_there}, host_sync="gloo")
    whole, resumed = train(3, [saves, resumes], cwd=tmp_path).values()
    assert any("from here on, the bits may differ from those of an uninterrupted" in one for one in resumed.notices)
    assert any("gloo" in reason for reason in resumed.summary.exempt_from_exactness)
    assert (resumed.summary.steps, resumed.summary.resumed_after_step) == (STEPS, SAVED)
    assert resumed.summary.loss_last == pytest.approx(whole.summary.loss_last, rel=1e-4)
    flags = ["--pef", str(path), "--steps", str(STEPS), "--host-sync", "gloo", "--resume", from_there, "--exact"]
    refused = run_mpi(3, [*SAMBASIM, *RUN, *flags], cwd=tmp_path)
    assert refused.returncode == 2
    assert "gradient sync = gloo (checkpoint: fixed order of addition)" in refused.stderr


def test_four_replicas_become_two(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> None:
    data = ["--data", "synthetic", "--set", "data.samples=437"]
    flags = [*RUN, "--pef", str(pefs["digits"].path), *data, "--checkpoint-dir", "saved"]
    sambasim([*flags, "--emulate-replicas", "4", "--steps", "10"], tmp_path)
    again = [*flags, "--epochs", "2", "--resume"]
    refused = sambasim([*again, "--emulate-replicas", "2", "--exact"], tmp_path)
    assert refused.exit_code == 2
    assert "replicas = 2 (checkpoint: 4)" in refused.stderr
    result = run_mpi(2, [*SAMBASIM, *again], cwd=tmp_path).check()
    assert "notice: changed since the checkpoint: replicas = 2 (checkpoint: 4)" in result.stdout
    # 437 samples: 160 by ten steps of four replicas; of the other 277, two replicas make 34 steps of 8.
    assert "step 98/98" in result.stdout
