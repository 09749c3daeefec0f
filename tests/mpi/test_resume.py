"""A resumed run has the bits of an uninterrupted one, by every way to sync, and whatever else may differ."""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sambasim.errors import Interrupted
from sambasim.options.run import RunOptions
from sambasim.records.digests import read_recording
from sambasim.records.metrics import SummaryRecord
from sambasim.report.compare.runs import compare_runs
from sambasim.runtime.checkpoint.folder import LOCK_FILE
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.run_observer import RunObserver, RunObservers, Step
from sambasim.runtime.single_rank import single_rank
from tests.faults.command import sambasim
from tests.support.examples import VARIANTS, CompiledExample
from tests.support.mpi import RANKS, ROOT, Result, run_mpi
from tests.support.whole import is_whole, whole, whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "resume.py"
SAMBASIM = [sys.executable, "-m", "sambasim"]
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

RUN = ["run", "--threads", "1", "--no-evaluate", "--grad-accumulation-steps", "2"]
DRAWS = ["--data", "drawing.py:samples"]


@pytest.fixture(scope="module")
def compiled(examples: list[CompiledExample]) -> list[CompiledExample]:
    """What is resumed: by default, every example with one of its variants."""
    return examples if is_whole() else examples[:: VARIANTS + 1]


def check_resumed(np: int, paths: Sequence[Path], folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Each PEF ends alike, whether its run was interrupted or not, and no two PEFs do."""
    result = run_mpi(np, [sys.executable, str(BODY), str(folder), *map(str, paths)], timeout=280, env=env).check()
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(paths) * (1 if np == 1 else 2), result.stdout
    assert [line["name"] for line in lines if line["whole"] != line["resumed"]] == []
    assert len({line["whole"][0] for line in lines}) == len(paths), "they cannot all have been trained"


@pytest.mark.parametrize("np", [np if np == 2 else whole_case(np) for np in RANKS])
def test_every_example_goes_on_with_its_bits(np: int, compiled: list[CompiledExample], tmp_path: Path) -> None:
    """Within an epoch, with accumulation and a schedule; each way to sync, from what another has written."""
    check_resumed(np, [one.path for one in compiled], tmp_path)


@pytest.fixture(scope="module")
def pefs(examples: list[CompiledExample]) -> Mapping[str, CompiledExample]:
    """By example, trained by AdamW: digits has BatchNorm and dropout."""
    return {one.example: one for one in examples if one.optimizer == "adamw" and not one.clipped}


@pytest.fixture
def digits(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> list[str]:
    """A run of STEPS steps on DRAWING, in `tmp_path`."""
    (tmp_path / "drawing.py").write_text(DRAWING)
    return [*RUN, "--pef", str(pefs["digits"].path), *DRAWS, "--steps", str(STEPS)]


def start(np: int, argv: list[str], folder: Path) -> Result:
    return run_mpi(np, [*SAMBASIM, *argv], cwd=folder)


def summary(np: int, argv: list[str], folder: Path) -> SummaryRecord:
    return SummaryRecord.model_validate_json(start(np, [*argv, "--json"], folder).check().stdout)


def saving(where: str) -> list[str]:
    return ["--checkpoint-dir", where, "--checkpoint-every", str(SAVED)]


def going_on(where: str) -> list[str]:
    return ["--resume", f"{where}/step-{SAVED:010}"]


def test_with_another_number_of_data_workers_step_by_step(digits: list[str], tmp_path: Path) -> None:
    whole = summary(2, [*digits, "--set", "data.workers=1", "--record-digests", "whole", *saving("saved")], tmp_path)
    workers = ["--set", "data.workers=2", "--exact"]
    resumed = summary(2, [*digits, *workers, "--record-digests", "rest", *going_on("saved")], tmp_path)
    assert resumed.resumed_after_step == SAVED
    assert (resumed.state_sha256, resumed.loss_last) == (whole.state_sha256, whole.loss_last)
    found = compare_runs(read_recording(tmp_path / "whole"), read_recording(tmp_path / "rest"))
    assert found.alike, found.verdict
    assert (found.steps, found.replicas) == (STEPS - SAVED, (0, 1))
    assert sambasim(["compare", "whole", "rest"], tmp_path).exit_code == 0


def overrides(steps: int) -> dict[str, object]:
    schedule = {"name": "constant"}
    return {"training": {"steps": steps, "accumulation_steps": 2, "evaluate": False, "schedule": schedule}}


def train(path: Path, *listeners: RunObserver, **asked: object) -> SummaryRecord:
    """Two replicas, played by this process."""
    given = {"pef": str(path), "threads": 1, "emulate_replicas": 2, "overrides": overrides(STEPS), **asked}
    return TrainingJob(path, RunOptions.model_validate(given), single_rank("here"), RunObservers(listeners)).run()


class Ends(RunObserver):
    """Asks the run to end, once it cannot save any more."""

    def __init__(self, saved: Path) -> None:
        self._lock = saved / LOCK_FILE

    def stepped(self, step: Step) -> None:
        if step.step == SAVED + 1:
            self._lock.unlink()
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("goes_on", [True, False])
def test_where_the_end_cannot_be_saved_the_last_checkpoint_is_told_whoever_wrote_it(
    goes_on: bool, pefs: Mapping[str, CompiledExample], tmp_path: Path
) -> None:
    path, saved = pefs["logistic_regression"].path, tmp_path / "saved"
    checkpoint: dict[str, object] = {"dir": saved, "every": "99"}
    if goes_on:
        train(path, checkpoint={"dir": saved}, overrides=overrides(SAVED))
        checkpoint["resume"] = "newest"
    with pytest.raises(Interrupted) as caught:
        train(path, Ends(saved), checkpoint=checkpoint)
    left = f"the last checkpoint is step-{SAVED:010}" if goes_on else "there is no checkpoint yet"
    assert caught.value.what == f"SIGUSR1: the run has ended after step {STEPS}, which could not be saved; {left}"


@whole
def test_by_gloo_without_a_promise_of_bits(digits: list[str], tmp_path: Path) -> None:
    """What it does promise: to say so, to refuse --exact where the bits were others', and the same end on all ranks."""
    whole = summary(3, [*digits, *saving("saved")], tmp_path)
    by_gloo = [*digits, "--host-sync", "gloo", *going_on("saved")]
    refused = start(3, [*by_gloo, "--exact"], tmp_path)
    assert refused.returncode == 2
    assert "gradient sync = gloo (checkpoint: fixed order of addition)" in refused.stderr
    printed = start(3, [*by_gloo, "--metrics", "m.jsonl"], tmp_path).check().stdout
    assert "from here on, the bits may differ from those of an uninterrupted run" in printed
    resumed = SummaryRecord.model_validate_json((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert any("gloo" in reason for reason in resumed.exempt_from_exactness)
    assert (resumed.steps, resumed.samples, resumed.resumed_after_step) == (STEPS, whole.samples, SAVED)
    assert resumed.loss_last == pytest.approx(whole.loss_last, rel=1e-4)


@whole
def test_a_parameter_server_resumes_what_devices_saved(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> None:
    flags = ["run", "--threads", "1", "--pef", str(pefs["digits"].path), "--steps", "6", "--no-evaluate"]
    whole = summary(2, [*flags, "--reduce-on-rdu", "--checkpoint-dir", "a", "--checkpoint-every", "3"], tmp_path)
    served = ["--host-sync", "parameter-server", "--parameter-servers", "1", "--exact", "--checkpoint-dir", "b"]
    resumed = summary(3, [*flags, *served, "--checkpoint-every", "5", "--resume", "a/step-0000000003"], tmp_path)
    assert resumed.state_sha256 == whole.state_sha256
    back = summary(2, [*flags, "--reduce-on-rdu", "--exact", "--resume", "b/step-0000000005"], tmp_path)
    assert back.state_sha256 == whole.state_sha256


def test_four_replicas_become_two(pefs: Mapping[str, CompiledExample], tmp_path: Path) -> None:
    flags = ["run", "--threads", "1", "--pef", str(pefs["digits"].path), "--checkpoint-dir", "saved", "--no-evaluate"]
    sambasim([*flags, "--emulate-replicas", "4", "--steps", "10"], tmp_path)
    again = [*flags, "--epochs", "2", "--resume"]
    refused = sambasim([*again, "--emulate-replicas", "2", "--exact"], tmp_path)
    assert refused.exit_code == 2
    assert "replicas = 2 (checkpoint: 4)" in refused.stderr
    result = start(2, again, tmp_path).check()
    assert "notice: changed since the checkpoint: replicas = 2 (checkpoint: 4)" in result.stdout
    # 1,437 samples: 160 by ten steps of four replicas; of the other 1,277, two replicas make 159 steps of 8.
    assert "step 348/348" in result.stdout
