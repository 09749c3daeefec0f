"""Checkpoints of real jobs: when they are written, what ends a run, and what a disk that is full does."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sambasim.runtime.checkpoint.folder import LOCK_FILE
from tests.support.examples import compile_examples
from tests.support.mpi import codes_of_signalled, is_open_mpi, job_environ, mpirun, run_mpi

RUN = [sys.executable, "-m", "sambasim", "run", "--threads", "1"]
SLOW = """
import time
import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.rand(1, 8, 8), index % 10


def samples():
    return Samples()
"""
STEADY = ["--no-evaluate", "--set", "training.schedule.name=constant"]
"""A rate that does not go by how long the run is."""

LONG = ["--steps", "1000000", *STEADY]


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits example, with BatchNorm and dropout, trained by Adam."""
    for one in compile_examples(tmp_path_factory.mktemp("examples")):
        if one.example == "digits" and one.optimizer == "adam":
            return one.path
    raise AssertionError("there is no such example")


def run(np: int, pef: Path, folder: Path, *flags: str, env: Mapping[str, str] | None = None) -> Mapping[str, object]:
    """The summary of a run that ends well."""
    result = run_mpi(np, [*RUN, "--pef", str(pef), "--json", *flags], cwd=folder, env=env).check()
    summary: Mapping[str, object] = json.loads(result.stdout)
    return summary


def names(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


def kinds(metrics: Path) -> Sequence[str]:
    return [json.loads(line)["kind"] for line in metrics.read_text().splitlines()]


def test_they_are_written_by_steps_and_at_the_end_and_the_oldest_go(pef: Path, tmp_path: Path) -> None:
    flags = ["--steps", "7", "--checkpoint-dir", "saved", "--checkpoint-every", "2", "--keep", "2"]
    summary = run(2, pef, tmp_path, *flags)
    assert names(tmp_path / "saved") == ["step-0000000006", "step-0000000007"]
    assert summary["checkpoint"] == "saved/step-0000000007"


def test_they_are_written_by_time(pef: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    flags = ["--data", "slow.py:samples", "--steps", "50", "--no-evaluate", "--metrics", "m.jsonl", "--keep", "99"]
    run(2, pef, tmp_path, *flags, "--checkpoint-dir", "saved", "--checkpoint-every", "1s")
    assert 2 <= kinds(tmp_path / "m.jsonl").count("checkpoint") == len(names(tmp_path / "saved")) < 50


def test_two_runs_do_not_write_into_one_folder(pef: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    descriptor = os.open(tmp_path / "saved" / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        result = run_mpi(2, [*RUN, "--pef", str(pef), "--steps", "1", "--checkpoint-dir", "saved"], cwd=tmp_path)
    finally:
        os.close(descriptor)
    assert result.returncode == 2
    assert "another run is writing its checkpoints into saved" in result.stderr


def test_what_a_run_that_died_was_writing_is_cleared_away(pef: Path, tmp_path: Path) -> None:
    for name in (".step-0000000001.partial", ".step-0000000002.partial"):
        (tmp_path / "saved" / name).mkdir(parents=True)
    run(1, pef, tmp_path, "--steps", "1", "--no-evaluate", "--checkpoint-dir", "saved")
    assert names(tmp_path / "saved") == ["step-0000000001"]


def test_a_parameter_server_goes_on_from_where_devices_were(pef: Path, tmp_path: Path) -> None:
    flags = ["--steps", "6", "--no-evaluate"]
    whole = run(2, pef, tmp_path, *flags, "--reduce-on-rdu", "--checkpoint-dir", "a", "--checkpoint-every", "3")
    served = ["--host-sync", "parameter-server", "--parameter-servers", "1", "--exact", "--checkpoint-dir", "b"]
    resumed = run(3, pef, tmp_path, *flags, *served, "--checkpoint-every", "5", "--resume", "a/step-0000000003")
    assert resumed["state_sha256"] == whole["state_sha256"]
    back = run(2, pef, tmp_path, *flags, "--reduce-on-rdu", "--exact", "--resume", "b/step-0000000005")
    assert back["state_sha256"] == whole["state_sha256"]


def test_they_are_written_by_epochs_after_the_evaluation(pef: Path, tmp_path: Path) -> None:
    data = ["--data", "synthetic", "--set", "data.samples=40", "--metrics", "m.jsonl"]
    whole = run(2, pef, tmp_path, *data, "--epochs", "3", "--checkpoint-dir", "saved", "--checkpoint-every", "1epoch")
    assert names(tmp_path / "saved") == ["step-0000000005", "step-0000000010", "step-0000000015"]
    resumed = run(2, pef, tmp_path, *data, "--epochs", "3", "--resume", "saved/step-0000000010")
    assert resumed["state_sha256"] == whole["state_sha256"]
    assert (resumed["steps"], resumed["samples"], resumed["resumed_after_step"]) == (15, 120, 10)
    assert resumed["loss_first"] == whole["loss_first"]


def test_metrics_go_on_where_the_checkpoint_was(pef: Path, tmp_path: Path) -> None:
    flags = ["--steps", "6", "--metrics", "m.jsonl", "--no-evaluate"]
    run(2, pef, tmp_path, *flags, "--checkpoint-dir", "saved", "--checkpoint-every", "4")

    def lines() -> list[dict[str, object]]:
        return [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]

    before = [(line["step"], line["loss"]) for line in lines() if line["kind"] == "step"]
    run(2, pef, tmp_path, *flags, "--resume", "saved/step-0000000004")
    assert [(line["step"], line["loss"]) for line in lines() if line["kind"] == "step"] == before
    assert [line["kind"] for line in lines()].count("summary") == 1


def test_a_job_script_says_the_same_each_time_it_is_started(pef: Path, tmp_path: Path) -> None:
    """The first time it begins, with the weights that it names; then it goes on, from the newest one that is whole."""
    run(1, pef, tmp_path, "--steps", "1", "--no-evaluate", "--save", "first.safetensors")
    begin = ["--no-evaluate", "--weights", "first.safetensors", "--set", "training.schedule.name=constant"]
    whole = run(2, pef, tmp_path, *begin, "--steps", "6")
    script = [*begin, "--checkpoint-dir", "saved", "--checkpoint-every", "2", "--resume", "if-any", "--exact"]
    first = run(2, pef, tmp_path, *script, "--steps", "4")
    notices = first["notices"]
    assert isinstance(notices, list)
    assert "starts from the beginning: saved holds no checkpoint" in notices
    assert first["resumed_after_step"] is None
    (tmp_path / "saved" / "step-0000000004" / "checkpoint.json").write_text("")
    second = run(2, pef, tmp_path, *script, "--steps", "6")
    assert (second["resumed_after_step"], second["state_sha256"]) == (2, whole["state_sha256"])


def test_nothing_begins_anew_where_all_that_there_was_is_damaged(pef: Path, tmp_path: Path) -> None:
    (tmp_path / "saved" / "damaged-step-0000000004").mkdir(parents=True)
    result = run_mpi(
        2, [*RUN, "--pef", str(pef), "--steps", "1", "--checkpoint-dir", "saved", "--resume", "if-any"], cwd=tmp_path
    )
    assert result.returncode == 2
    assert "there is no checkpoint in saved to resume from, only damaged ones: damaged-step-0000000004" in result.stderr


def test_four_replicas_become_two_and_say_so(pef: Path, tmp_path: Path) -> None:
    flags = ["--epochs", "2", "--checkpoint-dir", "saved"]
    run(4, pef, tmp_path, "--steps", "10", "--checkpoint-dir", "saved")
    again = [*RUN, "--pef", str(pef), *flags, "--resume"]
    refused = run_mpi(2, [*again, "--exact"], cwd=tmp_path)
    assert refused.returncode == 2
    assert "replicas = 2 (checkpoint: 4)" in refused.stderr
    result = run_mpi(2, again, cwd=tmp_path).check()
    assert "notice: changed since the checkpoint: replicas = 2 (checkpoint: 4)" in result.stdout
    # 1,437 samples: 160 by ten steps of four replicas; of the other 1,277, two replicas make 159 steps of 8.
    assert "step 348/348" in result.stdout
    assert run(1, pef, tmp_path, *flags, "--resume", "--emulate-replicas", "2")["steps"] == 348


@pytest.mark.parametrize("np", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda one: one.name)
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
            _wait_for_steps(tmp_path / "m.jsonl")
            job.send_signal(number)
            stdout, stderr = job.communicate(timeout=40)
        finally:
            job.kill()
    assert job.returncode in (codes_of_signalled(number) if np == 2 else {128 + number})
    (saved,) = names(tmp_path / "saved")
    assert f"{number.name}: the run has ended after step {int(saved[5:])}, which is saved as saved/{saved}" in stderr
    assert "error[" not in stderr
    assert f"{number.name}: the run ends after this step" in stdout
    flags = [*STEADY, "--steps", str(int(saved[5:]) + 3)]
    resumed = run(np, pef, tmp_path, *flags, "--checkpoint-dir", "saved", "--resume", "--exact")
    assert resumed["state_sha256"] == run(np, pef, tmp_path, *flags)["state_sha256"]


def _wait_for_steps(metrics: Path) -> None:
    until = time.monotonic() + 40
    while not metrics.exists() or metrics.read_text().count('"step"') < 3:
        assert time.monotonic() < until, "it does not begin to train"
        time.sleep(0.05)


def _mount(folder: Path, size: str) -> None:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk needs the right to mount one")


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_a_full_disk_keeps_the_last_checkpoint(policy: str, pef: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    saved = ["--checkpoint-dir", str(disk / "saved"), "--checkpoint-every", "2"]
    _mount(disk, "2m")  # room for the three that are kept
    try:
        run(2, pef, tmp_path, "--steps", "2", *saved)
        size = sum(file.stat().st_size for file in disk.rglob("*") if file.is_file())
        free = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(bytes(free - size // 2))
        command = [*RUN, "--pef", str(pef), "--steps", "6", *saved, "--resume", "--on-checkpoint-failure", policy]
        result = run_mpi(2, command, cwd=tmp_path)
        assert names(disk / "saved") == ["step-0000000002"]
        told = "checkpoint step-0000000004 cannot be written: No space left on device"
        if policy == "stop":
            assert result.returncode == 2
            assert told in result.stderr
        else:
            assert f"warning: {told}" in result.stdout
            assert result.returncode == 2  # for its weights are nowhere
            assert "the run is over, and its end is not saved: checkpoint step-0000000006" in result.stderr
            assert "training goes on, and the last checkpoint is step-0000000002" in result.stdout
            assert "2 checkpoints could not be written" in result.stdout
        (disk / "ballast").unlink()
        whole = run(2, pef, tmp_path, "--steps", "6")
        assert run(2, pef, tmp_path, "--steps", "6", *saved, "--resume")["state_sha256"] == whole["state_sha256"]
    finally:
        subprocess.run(["umount", str(disk)], check=False)
