"""The dynamic loss scale, and training in float16 with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor

from sambasim.cli.train import run_command
from sambasim.errors import InvariantError, NumericsError
from sambasim.ir.verify_training import training_step
from sambasim.options.schedules import LossScaleOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.run.training import LossScale
from tests.support.compiled import compile_from_options
from tests.support.deepspeed import LossScaler
from tests.support.examples import example_options

OPTIONS = LossScaleOptions(start=8.0, window=3, hysteresis=2, minimum=2.0)
OVERFLOWING = 2.0**24


def scales_after(overflows: str, options: LossScaleOptions = OPTIONS, dtype: str = "float32") -> list[float]:
    """The scale after each step; an `x` is a step that overflows."""
    scale, values = LossScale.first(options, dtype), []
    for step in overflows:
        scale.update(options, dtype, overflowed=step == "x")
        values.append(scale.value)
    return values


def test_a_static_one_stays_and_a_loss_of_float16_bounds_it() -> None:
    assert scales_after("xx....", OPTIONS.model_copy(update={"dynamic": False})) == [8] * 6
    options = OPTIONS.model_copy(update={"start": 2.0**16})
    assert scales_after("...x..x", options, "float16") == [2.0**15] * 6 + [2.0**14]


@pytest.mark.parametrize("overflows", ["xx.x.xx...x....x.x.x..xx", "x.x.x.xx..x...xx", "...x..xx.xx....."])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_it_is_that_of_deepspeed(overflows: str, consecutive: bool, hysteresis: int) -> None:
    scaler = LossScaler(
        initial_scale_power=20, loss_scale_window=3, hysteresis=hysteresis, consecutive_hysteresis=consecutive
    )
    theirs = []
    for step in overflows:
        scaler.update(step == "x")
        theirs.append(scaler.scale)
    options = LossScaleOptions(start=2.0**20, window=3, hysteresis=hysteresis, consecutive=consecutive)
    assert scales_after(overflows, options) == theirs


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = ("optimizer.name=adamw", "optimizer.lr=0.003", "compile.dtype=fp16", "training.loss_scale.hysteresis=1")
    cleared = ("optimizer.momentum=", "optimizer.nesterov=", "optimizer.weight_decay=")
    return compile_from_options(
        example_options("logistic_regression", tmp_path_factory.mktemp("fp16"), *cleared, *chosen)
    ).path


def run(pef: Path, *flags: object, steps: int = 2, **scale: object) -> Result:
    """`sambasim run` with these settings of the loss scale."""
    sets = [word for name, value in scale.items() for word in ("--set", f"training.loss_scale.{name}={value}")]
    words = ["--pef", pef, "--no-evaluate", "--steps", steps, *sets, *flags]
    return CliRunner().invoke(run_command, [str(word) for word in words])


def train(pef: Path, folder: Path, *flags: object, **asked: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The records of its steps, then of the summary; and the weights."""
    metrics, weights = folder / "metrics", folder / "w.safetensors"
    result = run(pef, "--metrics", metrics, "--save", weights, *flags, **asked)
    assert result.exit_code == 0, result.output
    return records(metrics), load_file(weights)


def records(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def error_of(result: Result) -> NumericsError:
    assert isinstance(result.exception, NumericsError), result.output
    return result.exception


def test_below_the_minimum_the_run_ends(pef: Path) -> None:
    """And the command of the error shows where the overflow begins."""
    scale = {"start": OVERFLOWING, "minimum": OVERFLOWING}
    error = error_of(run(pef, steps=3, **scale))
    assert error.what == "the gradients of step 1 are not finite in float16, at the smallest loss scale, 1.67772e+07"
    assert "--set training.loss_scale.dynamic=false --debug-numerics" in str(error.remedy)
    origin = error_of(run(pef, "--debug-numerics", steps=3, dynamic="false", **scale))
    assert "gradient" in origin.what
    assert "inf" in origin.what


def stored(pef: Path) -> dict[str, Tensor]:
    symbols = read(pef).program.symbols
    return {symbols[name].torch_names[0]: tensor for name, tensor in map_weights(pef).items()}


def test_a_loss_that_is_never_finite_trains_nothing(pef: Path, tmp_path: Path) -> None:
    damaged, metrics = tmp_path / "nan.safetensors", tmp_path / "metrics"
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in stored(pef).items()}, damaged)
    never_finite = run(pef, "--on-nonfinite", "skip", "--metrics", metrics, "--weights", damaged)
    static = run(pef, start=OVERFLOWING, dynamic="false")
    for result in (never_finite, static):
        assert error_of(result).what.startswith("nothing was trained: in all 2 steps the loss or the gradients")
    scales = [record["loss_scale"] for record in records(metrics) if record["kind"] == "step"]
    assert scales == [2.0**16] * 2, "it is not the scale's fault"


def test_a_resumed_run_goes_on_with_the_scale_unless_it_sets_another(pef: Path, tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", tmp_path / "checkpoints")
    assert run(pef, *checkpoints, start=512.0, window=3).exit_code == 0
    for steps, start, expected in ((4, 512.0, [512, 1024]), (6, 256.0, [256, 256])):
        metrics, _ = train(pef, tmp_path, *checkpoints, "--resume", steps=steps, start=start, window=3)
        assert [record["loss_scale"] for record in metrics if record["kind"] == "step"][-2:] == expected


@pytest.mark.parametrize("flags", [[], ["--debug-numerics"], ["--on-nonfinite", "skip"]])
def test_a_step_that_overflows_is_skipped_and_no_error_of_numerics(pef: Path, tmp_path: Path, flags: list[str]) -> None:
    (step, summary), weights = train(pef, tmp_path, *flags, steps=1, start=OVERFLOWING)
    assert (step["loss_scale"], step["grad_norm"]) == (OVERFLOWING, None)
    assert (summary["loss_scale"], summary["skipped_steps"]) == (2.0**23, 1)
    assert weights.keys() == stored(pef).keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored(pef).items())


def test_the_scale_changes_no_bit_of_what_does_not_overflow(pef: Path, tmp_path: Path) -> None:
    """The loss is multiplied by a power of two, and gradients are divided by it in float32."""
    (first, *_), weights = train(pef, tmp_path, start=2.0**10, steps=3)
    _, others = train(pef, tmp_path, start=2.0**12, steps=3)
    assert first["loss_scale"] == 1024
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_only_master_weights_can_unscale_gradients(pef: Path) -> None:
    program = read(pef).program
    training_step(program)
    narrow = tuple(replace(optimizer, states=optimizer.states[1:]) for optimizer in program.optimizers)
    with pytest.raises(InvariantError, match="the loss is scaled, and gradients are not all checked and unscaled"):
        training_step(replace(program, optimizers=narrow))
