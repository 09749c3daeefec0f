"""A signal that asks a run to stop loses nothing: in Python a Run is returned, and the shell's saves what it was asked
to, and ends with the code of the signal."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sambasim as ss
from sambasim.errors import Interrupted
from tests.api.conftest import HELD_OUT, TRAIN, net, trained
from tests.cli.typed import invoked


class Striking:
    """Samples, of which one sends a signal to this process whenever it is read."""

    def __init__(self, at: int, number: int = signal.SIGINT, samples: Any = TRAIN) -> None:
        self.at, self.number, self.samples = at, number, samples

    def __len__(self) -> int:
        return len(self.samples[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.at:
            os.kill(os.getpid(), self.number)
        return self.samples[0][index], self.samples[1][index]


IN_ORDER: dict[str, Any] = {"set": {"data.shuffle": False}, "threads": 1, "steps": 50}


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        (Striking(0), 1),  # while the first sample shows what the data set has: before the first step
        ((Striking(64, signal.SIGTERM), HELD_OUT), 2),
        ((TRAIN, Striking(3, signal.SIGUSR1, HELD_OUT)), 5),  # in the evaluation, after the first epoch
    ],
)
def test_an_interrupted_run_returns_what_is_trained_and_the_script_goes_on(
    pef: ss.Pef, data: Any, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    run = ss.run(pef, data, **IN_ORDER)
    assert run.interrupted
    assert run.summary.interrupted in ("SIGINT", "SIGTERM", "SIGUSR1")
    assert f"{run.summary.interrupted}: the run ends after this step" in capsys.readouterr().out
    assert len(run.losses) == run.summary.steps == steps
    assert len(run.evaluations) == (steps == 5)
    assert ", interrupted, loss" in repr(run)
    whole = trained(pef, **{**IN_ORDER, "steps": steps})
    assert not whole.interrupted
    assert whole.summary.interrupted is None
    assert whole.summary.state_sha256 == run.summary.state_sha256
    assert torch.equal(run.load_into(net()).state_dict()["0.weight"], whole.weights["0.weight"])
    assert signal.getsignal(signal.SIGINT) is before


_SAMPLES = """
import os, signal, torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, index):
        if index == 64:
            os.kill(os.getpid(), signal.{})
        return torch.ones(2), 0

samples = Samples
"""


@pytest.mark.parametrize(
    ("number", "flags", "clause"),
    [
        (signal.SIGTERM, (), "and nothing of it is saved"),
        (signal.SIGINT, ("--save", "w.safetensors"), "whose weights are saved as w.safetensors"),
        (
            signal.SIGUSR1,
            ("--save", "w.safetensors", "--checkpoint-dir", "ck"),
            "which is saved as ck/step-0000000002, its weights as w.safetensors",
        ),
    ],
)
def test_an_interrupted_command_saves_its_weights_and_ends_with_the_code_of_the_signal(
    number: signal.Signals, flags: tuple[str, ...], clause: str, pef: ss.Pef, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "striking.py").write_text(_SAMPLES.format(number.name))
    run = ["run", "--pef", str(pef.path), "--data", "striking.py:samples", "--threads", "1", "--steps", "50", "--json"]
    run += ["--emulate-replicas", "2"]
    ended = invoked(*run, "--set", "data.shuffle=false", *flags)
    error = ended.exception
    assert isinstance(error, Interrupted), error
    assert error.exit_code == 128 + number
    assert error.what == f"{number.name}: the run has ended after step 2, {clause}"
    summary = json.loads(ended.stdout)
    assert (summary["interrupted"], summary["steps"]) == (number.name, 2)
    if flags:
        weights = load_file("w.safetensors")
        assert (
            ss.predict(pef, HELD_OUT, weights=weights).loss == ss.predict(pef, HELD_OUT, weights="w.safetensors").loss
        )
