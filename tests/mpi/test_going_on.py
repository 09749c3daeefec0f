"""Going on in the midst of an epoch, in the ways that a run may differ: workers, compiled sections, digests, gloo; and
two runs at once in one folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from sambasim.errors import Interrupted, OptionError
from sambasim.options.run import RunOptions
from sambasim.records.digests import read_recording
from sambasim.records.metrics import SummaryRecord
from sambasim.report.compare.runs import compare_runs
from sambasim.runtime.checkpoint.choose import AUTO, NEWEST
from sambasim.runtime.checkpoint.claim import LOCK_FILE
from sambasim.runtime.checkpoint.folder import checkpoints_in
from sambasim.runtime.checkpoint.reader import check
from sambasim.runtime.engine.compiler import CACHE_VARIABLE
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.listener import Listeners, SilentListener, Step
from sambasim.runtime.single_rank import single_rank
from tests.support.examples import CompiledExample, compile_examples
from tests.support.mpi import Result, codes_of_signalled, job_environ, mpirun, run_job, run_mpi

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
def pefs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CompiledExample]:
    """By example, trained by AdamW: digits has BatchNorm and dropout."""
    wanted: dict[str, CompiledExample] = {}
    for one in compile_examples(tmp_path_factory.mktemp("examples")):
        if one.optimizer == "adamw" and not one.clipped:
            wanted[one.example] = one
        if len(wanted) == 2:
            break
    return wanted


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


def test_with_data_workers_however_many_there_are(digits: list[str], tmp_path: Path) -> None:
    whole = summary(2, [*digits, "--set", "data.workers=1", *saving("saved")], tmp_path)
    resumed = summary(2, [*digits, "--set", "data.workers=2", *going_on("saved"), "--exact"], tmp_path)
    assert resumed.resumed_after_step == SAVED
    assert (resumed.state_sha256, resumed.loss_last) == (whole.state_sha256, whole.loss_last)


def overrides(steps: int) -> dict[str, object]:
    schedule = {"name": "constant"}
    return {"training": {"steps": steps, "accumulation_steps": 2, "evaluate": False, "schedule": schedule}}


def train(path: Path, *listeners: SilentListener, **asked: object) -> SummaryRecord:
    """Two replicas, played by this process."""
    given = {"pef": str(path), "threads": 1, "emulate_replicas": 2, "overrides": overrides(STEPS), **asked}
    return TrainingJob(path, RunOptions.model_validate(given), single_rank("here"), Listeners(listeners)).run()


def test_with_compiled_sections(
    pefs: Mapping[str, CompiledExample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bits are their own, and those of every run."""
    monkeypatch.setenv(CACHE_VARIABLE, "")  # a run sets it, and it is put back
    path, saved = pefs["logistic_regression"].path, tmp_path / "saved" / f"step-{SAVED:010}"
    whole = train(path, engine="inductor", checkpoint={"dir": saved.parent, "every": str(SAVED)})
    if whole.engine != "inductor":
        pytest.skip("this machine has no compiler")
    resumed = train(path, engine="inductor", checkpoint={"resume": str(saved), "exact": True})
    assert (resumed.engine, resumed.resumed_after_step) == ("inductor", SAVED)
    assert (resumed.state_sha256, resumed.loss_last) == (whole.state_sha256, whole.loss_last)
    with pytest.raises(OptionError, match=r"engine = plain \(checkpoint: inductor\)"):
        train(path, checkpoint={"resume": str(saved), "exact": True})


@pytest.mark.parametrize("resume", [NEWEST, AUTO])
def test_a_folder_that_is_not_there_is_not_looked_into(
    resume: str, pefs: Mapping[str, CompiledExample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not claimed: another run may make it, and write there."""
    monkeypatch.setattr("sambasim.runtime.job.find", lambda *_: pytest.fail("it was looked into"))
    with pytest.raises(OptionError, match="there is no checkpoint in"):
        train(pefs["logistic_regression"].path, checkpoint={"dir": tmp_path / "saved", "resume": resume})
    assert not (tmp_path / "saved").exists()


class Ends(SilentListener):
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
    with pytest.raises(Interrupted) as told:
        train(path, Ends(saved), checkpoint=checkpoint)
    left = f"the last checkpoint is step-{SAVED:010}" if goes_on else "there is no checkpoint yet"
    assert told.value.what == f"SIGUSR1: the run has ended after step {STEPS}, which could not be saved; {left}"


def test_with_the_digests_of_the_steps_that_are_left(digits: list[str], tmp_path: Path) -> None:
    whole = summary(2, [*digits, "--record-digests", "whole", *saving("saved")], tmp_path)
    resumed = summary(2, [*digits, "--record-digests", "rest", *going_on("saved")], tmp_path)
    assert resumed.state_sha256 == whole.state_sha256
    found = compare_runs(read_recording(tmp_path / "whole"), read_recording(tmp_path / "rest"))
    assert found.alike, found.verdict
    assert (found.steps, found.replicas) == (STEPS - SAVED, (0, 1))
    assert run_job([*SAMBASIM, "compare", "whole", "rest"], cwd=tmp_path).returncode == 0


def test_by_gloo_without_a_promise_of_bits(digits: list[str], tmp_path: Path) -> None:
    """What it does promise: to say so, to refuse --exact where the bits were others', and the same end on all ranks."""
    whole = summary(3, [*digits, *saving("saved")], tmp_path)
    by_gloo = [*digits, "--host-sync", "gloo", *going_on("saved")]
    refused = start(3, [*by_gloo, "--exact"], tmp_path)
    assert refused.returncode == 2
    assert "gradient sync = gloo (checkpoint: one order of additions)" in refused.stderr
    told = start(3, [*by_gloo, "--metrics", "m.jsonl"], tmp_path).check().stdout
    assert "the bits from here on are not promised to be those of a run that was never interrupted" in told
    resumed = SummaryRecord.model_validate_json((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert any("gloo" in reason for reason in resumed.exempt_from_exactness)
    assert (resumed.steps, resumed.samples, resumed.resumed_after_step) == (STEPS, whole.samples, SAVED)
    assert resumed.loss_last == pytest.approx(whole.loss_last, rel=1e-4)


def test_a_second_run_is_refused_and_the_first_one_keeps_its_checkpoints(digits: list[str], tmp_path: Path) -> None:
    often = ["--steps", "1000000", "--set", "training.schedule.name=constant", "--checkpoint-dir", "saved"]
    first = [mpirun(), "-np", "2", *SAMBASIM, *digits, *often, "--checkpoint-every", "1", "--metrics", "m.jsonl"]
    told, environ = tmp_path / "stderr", job_environ("two runs")
    with (
        told.open("w") as stderr,
        subprocess.Popen(first, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=stderr) as job,
    ):
        try:
            _wait_for_checkpoints(tmp_path / "m.jsonl", 2)
            for how in ([], ["--resume", "auto"]):
                second = start(1, [*digits, "--checkpoint-dir", "saved", *how], tmp_path)
                assert second.returncode == 2
                assert "another run is writing its checkpoints into saved" in second.stderr
            _wait_for_checkpoints(tmp_path / "m.jsonl", _checkpoints(tmp_path / "m.jsonl") + 2)
            job.send_signal(signal.SIGUSR1)
            assert job.wait(timeout=40) in codes_of_signalled(signal.SIGUSR1)
        finally:
            job.kill()
    there = checkpoints_in(tmp_path / "saved")
    assert len(there) == 3
    assert f"SIGUSR1: the run has ended after step {int(there[0].name[5:])}, which is saved" in told.read_text()
    for path in there:
        check(path)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {LOCK_FILE, *(path.name for path in there)}


def _checkpoints(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return sum(json.loads(line)["kind"] == "checkpoint" for line in lines)


def _wait_for_checkpoints(metrics: Path, count: int) -> None:
    until = time.monotonic() + 40
    while _checkpoints(metrics) < count:
        assert time.monotonic() < until, "it does not save"
        time.sleep(0.05)
