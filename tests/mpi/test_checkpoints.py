"""Saving checkpoints: when they are written, what happens to older ones, and what a signal or a full disk does."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sambasim.records.metrics import SummaryRecord
from sambasim.runtime.checkpoint.content import Checkpoint
from sambasim.runtime.checkpoint.folder import LOCK_FILE, checkpoints_in
from tests.faults.command import sambasim
from tests.support.examples import CompiledExample
from tests.support.mpi import SAMBASIM, codes_of_signalled, is_open_mpi, job_environ, mpirun, run_mpi
from tests.support.whole import whole_case

RUN = [*SAMBASIM, "run", "--threads", "1"]
STEADY = ["--no-evaluate", "--set", "training.schedule.name=constant"]
"""A learning rate that does not depend on the length of the run."""

TWO = ["--emulate-replicas", "2"]
"""Two replicas in this process; `run_mpi` tests what takes two ranks."""

LONG = ["--steps", "1000000", *STEADY]


@pytest.fixture(scope="module")
def pef(examples: list[CompiledExample]) -> Path:
    """The digits example, with BatchNorm and dropout, trained by Adam."""
    return next(one.path for one in examples if one.example == "digits" and one.optimizer == "adam")


def run(pef: Path, folder: Path, *flags: str) -> SummaryRecord:
    return sambasim([*RUN[3:], "--pef", str(pef), "--json", *flags], folder).summary


def names(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


def lines(metrics: Path, kind: str) -> Sequence[Mapping[str, object]]:
    text = metrics.read_text() if metrics.exists() else ""
    return [line for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()) if line["kind"] == kind]


def test_by_steps_and_at_the_end(pef: Path, tmp_path: Path) -> None:
    (tmp_path / "saved" / ".step-0000000001.0123456789abcdef").mkdir(parents=True)  # of a run that died
    flags = ["--steps", "7", "--checkpoint-dir", "saved", "--checkpoint-every", "2", "--keep", "2", "--no-evaluate"]
    summary = run(pef, tmp_path, *TWO, *flags)
    assert names(tmp_path / "saved") == ["step-0000000006", "step-0000000007"]
    assert summary.checkpoint == "saved/step-0000000007"
    for steps, where in (("7", "the last one of the run"), ("5", "beyond --steps 5")):
        again = ["--steps", steps, "--resume", "saved/step-0000000007", "--no-evaluate"]
        outcome = sambasim([*RUN[3:], "--pef", str(pef), *TWO, *again], tmp_path)
        assert f"nothing was left to do: the checkpoint is at step 7, {where}\n" in outcome.stdout


def test_by_epochs_after_the_evaluation_and_metrics_continue(pef: Path, tmp_path: Path) -> None:
    flags = [*TWO, "--data", "synthetic", "--set", "data.samples=40", "--metrics", "m.jsonl", "--epochs", "3"]
    whole = run(pef, tmp_path, *flags, "--checkpoint-dir", "saved", "--checkpoint-every", "1epoch")
    assert names(tmp_path / "saved") == ["step-0000000005", "step-0000000010", "step-0000000015"]
    before = [(line["step"], line["loss"]) for line in lines(tmp_path / "m.jsonl", "step")]
    resumed = run(pef, tmp_path, *flags, "--resume", "saved/step-0000000010")
    assert resumed.state_sha256 == whole.state_sha256
    assert (resumed.steps, resumed.samples, resumed.resumed_after_step) == (15, 120, 10)
    assert resumed.loss_first == whole.loss_first
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "m.jsonl", "step")] == before
    assert len(lines(tmp_path / "m.jsonl", "summary")) == 1


def test_a_job_script_that_is_started_again(pef: Path, tmp_path: Path) -> None:
    """At first it starts from the weights that it names; then it resumes from the newest undamaged checkpoint."""
    run(pef, tmp_path, "--steps", "1", "--no-evaluate", "--save", "first.safetensors")
    begin = [*TWO, *STEADY, "--weights", "first.safetensors"]
    whole = run(pef, tmp_path, *begin, "--steps", "6")
    script = [*begin, "--checkpoint-dir", "saved", "--checkpoint-every", "2", "--resume", "if-any", "--exact"]
    first = run(pef, tmp_path, *script, "--steps", "4")
    assert "starts from the beginning: saved holds no checkpoint" in str(first.notices)
    assert first.resumed_after_step is None
    (tmp_path / "saved" / "step-0000000004" / "checkpoint.json").write_text("")
    second = run(pef, tmp_path, *script, "--steps", "6")
    assert (second.resumed_after_step, second.state_sha256) == (2, whole.state_sha256)
    for path in (tmp_path / "saved").glob("step-*"):
        path.rename(path.with_name(f"damaged-{path.name}-2"))
    refused = sambasim([*RUN[3:], "--pef", str(pef), *script, "--steps", "6"], tmp_path)
    assert refused.returncode == 2
    assert "there is no checkpoint in saved to resume from, only damaged ones: damaged-step-" in refused.stderr


@pytest.mark.parametrize(
    ("np", "number"),
    [
        (1, signal.SIGTERM),
        (2, signal.SIGUSR1),
        whole_case(1, signal.SIGINT),
        whole_case(1, signal.SIGUSR1),
        whole_case(2, signal.SIGTERM),
        whole_case(2, signal.SIGINT),
    ],
)
def test_a_signal_ends_the_run_after_its_step_and_it_goes_on(
    np: int, number: signal.Signals, pef: Path, tmp_path: Path
) -> None:
    if np == 2 and number is not signal.SIGUSR1 and is_open_mpi():
        pytest.skip("Open MPI's mpirun kills its ranks half a second after these")
    command = [*RUN, "--pef", str(pef), *LONG, "--checkpoint-dir", "saved", "--metrics", "m.jsonl"]
    started = [mpirun(), "-np", "2", *command] if np == 2 else command
    with subprocess.Popen(
        started, cwd=tmp_path, env=job_environ("signals"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            _wait_for(tmp_path / "m.jsonl", "step", 3)
            job.send_signal(number)
            stdout, stderr = job.communicate(timeout=40)
        finally:
            job.kill()
    assert job.returncode in (codes_of_signalled(number) if np == 2 else {128 + number})
    (saved,) = names(tmp_path / "saved")
    assert f"{number.name}: the run has ended after step {int(saved[5:])}, which is saved as saved/{saved}" in stderr
    assert "error[" not in stderr
    assert f"{number.name}: the run ends after this step" in stdout
    flags = [*STEADY, "--steps", str(int(saved[5:]) + 3), "--emulate-replicas", str(np)]
    resumed = run(pef, tmp_path, *flags, "--checkpoint-dir", "saved", "--resume", "--exact")
    assert resumed.state_sha256 == run(pef, tmp_path, *flags).state_sha256


def _wait_for(metrics: Path, kind: str, count: int) -> None:
    until = time.monotonic() + 60
    while len(lines(metrics, kind)) < count:
        assert time.monotonic() < until, f"fewer than {count} records of {kind}"
        time.sleep(0.05)


@pytest.mark.parametrize("every", ["1", whole_case("1s")])
def test_a_second_run_is_refused_and_the_first_one_keeps_its_checkpoints(every: str, pef: Path, tmp_path: Path) -> None:
    """Also if they are saved by time, on which all ranks must agree."""
    command = [*RUN, "--pef", str(pef), *LONG, "--checkpoint-dir", "saved"]
    first = [mpirun(), "-np", "2", *command, "--checkpoint-every", every, "--metrics", "m.jsonl"]
    printed, environ = tmp_path / "stderr", job_environ("two runs")
    with (
        printed.open("w") as stderr,
        subprocess.Popen(first, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=stderr) as job,
    ):
        try:
            _wait_for(tmp_path / "m.jsonl", "checkpoint", 2)
            for how in ([], ["--resume", "auto"]):
                second = sambasim([*command[3:], *how], tmp_path)
                assert second.returncode == 2
                assert "another run is writing its checkpoints into saved" in second.stderr
            saved = len(lines(tmp_path / "m.jsonl", "checkpoint"))
            _wait_for(tmp_path / "m.jsonl", "checkpoint", saved + 2)
            job.send_signal(signal.SIGUSR1)
            assert job.wait(timeout=40) in codes_of_signalled(signal.SIGUSR1)
        finally:
            job.kill()
    there = checkpoints_in(tmp_path / "saved")
    assert len(there) == 3
    saved_all = len(lines(tmp_path / "m.jsonl", "checkpoint")) == len(lines(tmp_path / "m.jsonl", "step"))
    assert saved_all == (every == "1")
    assert f"SIGUSR1: the run has ended after step {int(there[0].name[5:])}, which is saved" in printed.read_text()
    for path in there:
        Checkpoint(path)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {LOCK_FILE, *(path.name for path in there)}


def _mount(folder: Path, size: str) -> None:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk needs the right to mount one")


@pytest.mark.parametrize("policy", ["warn", whole_case("stop")])
def test_a_full_disk_keeps_the_last_checkpoint(policy: str, pef: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    saved = ["--checkpoint-dir", str(disk / "saved"), "--checkpoint-every", "2"]
    _mount(disk, "2m")  # enough for the three that are kept
    try:
        run(pef, tmp_path, *TWO, "--steps", "2", *saved)
        size = sum(file.stat().st_size for file in disk.rglob("*") if file.is_file())
        free = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(bytes(free - size // 2))
        flags = ["--steps", "6", *saved, "--resume", "--on-checkpoint-failure", policy]
        result = run_mpi(2, [*RUN, "--pef", str(pef), *flags], cwd=tmp_path)
        assert names(disk / "saved") == ["step-0000000002"]
        failure = "checkpoint step-0000000004 cannot be written: No space left on device"
        assert result.returncode == 2  # if it went on, because its weights are nowhere
        assert failure in (result.stderr if policy == "stop" else result.stdout)
        if policy == "warn":
            assert f"warning: {failure}" in result.stdout
            assert "the run is over, and its end is not saved: checkpoint step-0000000006" in result.stderr
            assert "training goes on, and the last checkpoint is step-0000000002" in result.stdout
            assert "2 checkpoints could not be written" in result.stdout
        (disk / "ballast").unlink()
        whole = run(pef, tmp_path, *TWO, "--steps", "6")
        assert run(pef, tmp_path, *TWO, "--steps", "6", *saved, "--resume").state_sha256 == whole.state_sha256
    finally:
        subprocess.run(["umount", str(disk)], check=False)
