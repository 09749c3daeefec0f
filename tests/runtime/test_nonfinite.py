"""Losses that are NaN or infinite: a run stops, leaves the step out, or goes on, as it was asked to."""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file

from sambasim.errors import NumericsError
from sambasim.options.run import RunOptions
from sambasim.records.metrics import SummaryRecord
from sambasim.runtime.machine.process import repeatable
from sambasim.runtime.run.run_observer import MetricsFile, RunObserver
from tests.support.damaged import BATCH, OVERFLOWS, SAMPLES, compiled
from tests.support.eager import EagerReplica, PaddedOptimizer
from tests.support.runs import run_options, train_alone

Damage: TypeAlias = Mapping[str, Mapping[str, str]]
STEPS = SAMPLES // BATCH
OPTIMIZERS = {
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.dampening=0.5"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.01"),
    "clipped": ("optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.max_grad_norm=0.5"),
}


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nonfinite")
    return {name: compiled(folder, f"compile.pef_name={name}", *overrides) for name, overrides in OPTIMIZERS.items()}


class Notes(RunObserver):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noted(self, what: str) -> None:
        self.lines.append(what)


def train(pef: Path, *observers: RunObserver, damage: Damage | None = None, **asked: Any) -> SummaryRecord:
    """A run, by default of one epoch, in which samples are damaged."""
    options = run_options(pef, **{"data": {"args": damage or {}}, "training": {"epochs": 1}, **asked})
    return train_alone(pef, options, *observers, command=["sambasim", "run", "--pef", "a net"])


def test_a_run_stops_after_the_step_whose_loss_is_not_finite(pefs: dict[str, Path], tmp_path: Path) -> None:
    metrics, saved = tmp_path / "m.jsonl", tmp_path / "w.safetensors"
    with pytest.raises(NumericsError) as caught:
        train(pefs["adamw"], MetricsFile(metrics), damage={"inputs": {"9": "nan"}}, metrics=metrics, save=saved)
    assert str(caught.value) == (
        "the loss of step 3 is not finite: nan\n"
        "  where: epoch 1, step 3; nothing of it was saved\n"
        "  try:   sambasim run --pef 'a net' --debug-numerics to see where it begins, or --on-nonfinite skip to go on"
    )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("step", 1), ("step", 2), ("step", 3)]
    assert not saved.exists()


def test_a_run_that_ignores_it_goes_on_to_its_end(pefs: dict[str, Path]) -> None:
    summary = train(pefs["adamw"], damage={"inputs": {"9": "nan"}}, on_nonfinite="ignore")
    assert (summary.steps, summary.first_nonfinite_step, summary.skipped_steps) == (STEPS, 3, 0)
    assert math.isnan(summary.loss_last)


INPUTS: Damage = {"inputs": {"9": "nan", "10": "inf", "21": "-inf"}}
TARGETS: Damage = {"targets": {"21": OVERFLOWS, "47": OVERFLOWS}}


@pytest.mark.parametrize(
    ("optimizer", "damage", "skipped"),
    [
        *(("sgd", INPUTS, {2, 5}), ("adamw", TARGETS, {5, 11})),
        *(("clipped", INPUTS, {2, 5}), ("clipped", TARGETS, {5, 11})),
    ],
)
def test_a_skipped_step_leaves_everything_as_eager_would_that_takes_no_step(
    optimizer: str, damage: Damage, skipped: set[int], pefs: dict[str, Path], tmp_path: Path
) -> None:
    """Parameters and buffers, bit for bit; but where gradients are clipped, as torch adds up another norm."""
    notes, asked = Notes(), dict[str, Any](on_nonfinite="skip", save=tmp_path / "w.safetensors")
    summary = train(pefs[optimizer], notes, damage=damage, **asked)
    facts = (summary.steps, summary.skipped_steps, summary.first_nonfinite_step)
    assert facts == (STEPS, len(skipped), min(skipped) + 1)
    assert [note.split(",")[0] for note in notes.lines] == [f"step {step + 1} is skipped" for step in sorted(skipped)]
    if optimizer != "clipped":
        options = run_options(pefs[optimizer], data={"args": damage}, training={"epochs": 1}, **asked)
        with repeatable(1):
            eager = _eager_that_skips(pefs[optimizer], options, skipped)
        ours = load_file(tmp_path / "w.safetensors")
        assert [name for name, tensor in eager.items() if not torch.equal(ours[name], tensor)] == []
        assert all(tensor.isfinite().all() for tensor in ours.values())


def _eager_that_skips(pef: Path, asked: RunOptions, skipped: set[int]) -> dict[str, torch.Tensor]:
    eager = EagerReplica(pef, asked)
    optimizer = PaddedOptimizer(eager)
    for step in range(STEPS):
        before = {name: buffer.clone() for name, buffer in eager.module.named_buffers()}
        loss = eager.differentiate(step)
        assert math.isfinite(loss) == (step not in skipped)
        if math.isfinite(loss):
            optimizer.take_gradients()
            optimizer.step()
        else:
            for name, buffer in eager.module.named_buffers():
                buffer.copy_(before[name])
    return dict(eager.module.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_ends_in_skipped_steps_has_the_state_of_a_shorter_one(optimizer: str, pefs: dict[str, Path]) -> None:
    """Parameters, buffers, state and number of steps of the optimizer, by their digest."""
    damage = {"inputs": {str(sample): "nan" for sample in range(32, SAMPLES)}}
    longer = train(pefs[optimizer], damage=damage, on_nonfinite="skip")
    shorter = train(pefs[optimizer], training={"steps": 8})
    assert (longer.steps, longer.skipped_steps, shorter.steps) == (12, 4, 8)
    assert longer.state_sha256 == shorter.state_sha256


def test_a_run_that_goes_on_from_a_checkpoint_knows_how_many_steps_were_skipped(
    pefs: dict[str, Path], tmp_path: Path
) -> None:
    skipping: dict[str, Any] = {"damage": {"inputs": {"1": "nan", "9": "nan", "40": "nan"}}, "on_nonfinite": "skip"}
    checkpoint = {"dir": tmp_path / "saved"}
    whole = train(pefs["adamw"], **skipping)
    assert train(pefs["adamw"], training={"steps": 5}, checkpoint=checkpoint, **skipping).skipped_steps == 2
    resumed = train(pefs["adamw"], checkpoint={"resume": "auto", **checkpoint}, **skipping)
    assert (resumed.steps, resumed.skipped_steps, resumed.first_nonfinite_step) == (STEPS, 3, 1)
    assert resumed.state_sha256 == whole.state_sha256


@pytest.mark.parametrize(
    ("choice", "rate", "every", "words"),
    [
        *(
            (choice, 1e30, "1", "the parameter .* is not finite after step 1, whose loss")
            for choice in ("stop", "skip")
        ),
        ("ignore", 1e30, "1", None),
        # Or what has ruined parameters in the first step would in time take the place of every sound checkpoint.
        ("skip", 1e12, "1epoch", "the loss of step 22 is not finite, as were the 20 before it"),
    ],
)
def test_no_checkpoint_keeps_parameters_that_overflowed(
    choice: str, rate: float, every: str, words: str | None, pefs: dict[str, Path], tmp_path: Path
) -> None:
    """Under a finite loss, or in an epoch that ends in skipped steps."""
    saved = tmp_path / "saved"
    asked = {"optimizer": {"lr": rate}, "checkpoint": {"dir": saved, "every": every}, "training": {"epochs": 3}}
    with pytest.raises(NumericsError, match=words) if words else nullcontext():
        summary = train(pefs["sgd"], damage={"targets": {"0": "1e10"}}, on_nonfinite=choice, **asked)
        assert summary.first_nonfinite_step == 2
    assert bool([*saved.glob("step-*")]) == (words is None)


def test_skipping_changes_nothing_of_a_run_that_stays_finite(pefs: dict[str, Path]) -> None:
    summaries = [train(pefs["clipped"], on_nonfinite=choice) for choice in ("stop", "skip", "ignore")]
    assert len({summary.state_sha256 for summary in summaries}) == 1


def test_a_step_is_skipped_whole_if_one_of_its_micro_steps_is_not_finite(pefs: dict[str, Path]) -> None:
    """The second batch of the second step, which takes three."""
    damage = {"inputs": {str(sample): "nan" for sample in range(4 * BATCH, 5 * BATCH)}}
    of_one, of_two = (
        train(pefs["adamw"], damage=damage, training={"steps": n, "accumulation_steps": 3}, on_nonfinite="skip")
        for n in (1, 2)
    )
    assert (of_one.skipped_steps, of_two.skipped_steps, of_two.steps) == (0, 1, 2)
    assert of_one.state_sha256 == of_two.state_sha256
