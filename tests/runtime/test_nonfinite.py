"""Losses that are NaN or infinite: a run stops, leaves the step out, or goes on, as it was asked to."""

import json
import math
from pathlib import Path
from typing import Any

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


def options(
    pef: Path, damage: dict[str, object], training: dict[str, object] | None = None, **asked: Any
) -> RunOptions:
    """A run of one epoch in which samples are damaged."""
    return run_options(pef, data={"args": damage}, training=training or {"epochs": 1}, **asked)


def train(options: RunOptions, *observers: RunObserver) -> SummaryRecord:
    return train_alone(Path(options.pef), options, *observers, command=["sambasim", "run", "--pef", "a net"])


def test_a_run_stops_after_the_step_whose_loss_is_not_finite(pefs: dict[str, Path], tmp_path: Path) -> None:
    metrics, saved = tmp_path / "m.jsonl", tmp_path / "w.safetensors"
    asked = options(pefs["adamw"], {"inputs": {"9": "nan"}}, metrics=metrics, save=saved)
    with pytest.raises(NumericsError) as caught:
        train(asked, MetricsFile(metrics))
    assert str(caught.value) == (
        "the loss of step 3 is not finite: nan\n"
        "  where: epoch 1, step 3; nothing of it was saved\n"
        "  try:   sambasim run --pef 'a net' --debug-numerics to see where it begins, or --on-nonfinite skip to go on"
    )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("step", 1), ("step", 2), ("step", 3)]
    assert not saved.exists()


def test_a_run_that_ignores_it_goes_on_to_its_end(pefs: dict[str, Path]) -> None:
    summary = train(options(pefs["adamw"], {"inputs": {"9": "nan"}}, on_nonfinite="ignore"))
    assert (summary.steps, summary.first_nonfinite_step, summary.skipped_steps) == (STEPS, 3, 0)
    assert math.isnan(summary.loss_last)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("damage", "skipped"),
    [
        ({"inputs": {"9": "nan", "10": "inf", "21": "-inf"}}, {2, 5}),
        ({"targets": {"21": OVERFLOWS, "47": OVERFLOWS}}, {5, 11}),
    ],
    ids=["inputs", "overflow"],
)
def test_a_skipped_step_leaves_everything_as_eager_would_that_takes_no_step(
    optimizer: str, damage: dict[str, object], skipped: set[int], pefs: dict[str, Path], tmp_path: Path
) -> None:
    """Parameters and buffers, bit for bit; but where gradients are clipped, as torch adds up another norm."""
    asked = options(pefs[optimizer], damage, on_nonfinite="skip", save=tmp_path / "w.safetensors")
    notes = Notes()
    summary = train(asked, notes)
    assert (summary.steps, summary.skipped_steps, summary.first_nonfinite_step) == (
        STEPS, len(skipped), min(skipped) + 1,
    )  # fmt: skip
    assert [note.split(",")[0] for note in notes.lines] == [f"step {one + 1} is skipped" for one in sorted(skipped)]
    if optimizer != "clipped":
        with repeatable(1):
            eager = _eager_that_skips(pefs[optimizer], asked, skipped)
        ours = load_file(tmp_path / "w.safetensors")
        names = [name for name, tensor in eager.items() if not torch.equal(ours[name], tensor)]
        assert names == []
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
    damage: dict[str, object] = {"inputs": {str(sample): "nan" for sample in range(32, SAMPLES)}}
    whole = train(options(pefs[optimizer], damage, on_nonfinite="skip"))
    short = train(run_options(pefs[optimizer], training={"steps": 8}))
    assert (whole.steps, whole.skipped_steps, short.steps) == (12, 4, 8)
    assert whole.state_sha256 == short.state_sha256


def test_a_run_that_goes_on_from_a_checkpoint_knows_how_many_steps_were_skipped(
    pefs: dict[str, Path], tmp_path: Path
) -> None:
    damage: dict[str, object] = {"inputs": {"1": "nan", "9": "nan", "40": "nan"}}
    never = train(options(pefs["adamw"], damage, on_nonfinite="skip"))
    checkpoint = {"dir": tmp_path / "saved"}
    first = options(pefs["adamw"], damage, {"steps": 5}, on_nonfinite="skip", checkpoint=checkpoint)
    assert train(first).skipped_steps == 2
    resumed = train(options(pefs["adamw"], damage, on_nonfinite="skip", checkpoint={"resume": "auto", **checkpoint}))
    assert (resumed.steps, resumed.skipped_steps, resumed.first_nonfinite_step) == (STEPS, 3, 1)
    assert resumed.state_sha256 == never.state_sha256


@pytest.mark.parametrize("choice", ["stop", "skip", "ignore"])
def test_no_checkpoint_keeps_parameters_that_overflowed_under_a_finite_loss(
    choice: str, pefs: dict[str, Path], tmp_path: Path
) -> None:
    asked = options(
        pefs["sgd"],
        {"targets": {"0": "1e10"}},
        optimizer={"lr": 1e30},
        checkpoint={"dir": tmp_path / "saved", "every": "1"},
        on_nonfinite=choice,
    )
    if choice == "ignore":
        assert train(asked).first_nonfinite_step == 2
        assert list((tmp_path / "saved").glob("step-*"))
        return
    with pytest.raises(NumericsError, match=r"the parameter \S+ is not finite after step 1, whose loss still was"):
        train(asked)
    assert not list((tmp_path / "saved").glob("step-*"))


def test_an_epoch_that_ends_in_skipped_steps_is_not_saved(pefs: dict[str, Path], tmp_path: Path) -> None:
    """Or what has ruined parameters in the first step would in time take the place of every sound checkpoint."""
    ruined = options(
        pefs["sgd"],
        {"targets": {"0": "1e10"}},
        {"epochs": 3},
        optimizer={"lr": 1e12},
        checkpoint={"dir": tmp_path / "saved", "every": "1epoch"},
        on_nonfinite="skip",
    )
    with pytest.raises(NumericsError, match=r"the loss of step 22 is not finite, as were the 20 before it"):
        train(ruined)
    assert not list((tmp_path / "saved").glob("step-*"))


def test_skipping_changes_nothing_of_a_run_that_stays_finite(pefs: dict[str, Path]) -> None:
    summaries = [train(options(pefs["clipped"], {}, on_nonfinite=choice)) for choice in ("stop", "skip", "ignore")]
    assert len({summary.state_sha256 for summary in summaries}) == 1


def test_a_step_is_skipped_whole_if_one_of_its_micro_steps_is_not_finite(pefs: dict[str, Path]) -> None:
    second_of_second = range(4 * BATCH, 5 * BATCH)  # a step takes three batches
    damage: dict[str, object] = {"inputs": {str(sample): "nan" for sample in second_of_second}}
    one, two = (
        train(options(pefs["adamw"], damage, {"steps": steps, "accumulation_steps": 3}, on_nonfinite="skip"))
        for steps in (1, 2)
    )
    assert (one.skipped_steps, two.skipped_steps, two.steps) == (0, 1, 2)
    assert one.state_sha256 == two.state_sha256
