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

from sambasim.cli.run import run_command
from sambasim.errors import InvariantError, NumericsError
from sambasim.ir.verify_training import training_step
from sambasim.options.training import LossScaleOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.run.training import LossScale
from tests.support.compiled import compile_from_options
from tests.support.deepspeed import LossScaler
from tests.support.examples import example_options

OPTIONS = LossScaleOptions(start=8.0, window=3, hysteresis=2, minimum=2.0)


def _scales(overflows: str, options: LossScaleOptions = OPTIONS, dtype: str = "float32") -> list[float]:
    """The scale after each step; an `x` is a step that overflows."""
    scale, found = LossScale.first(options, dtype), []
    for one in overflows:
        scale.update(options, dtype, overflowed=one == "x")
        found.append(scale.value)
    return found


@pytest.mark.parametrize(
    ("overflows", "expected"),
    [
        ("...", [8, 8, 16]),
        ("x...", [8, 8, 8, 16]),  # the first overflow is tolerated, and the window begins again
        ("xx", [8, 4]),
        ("xx.x", [8, 4, 4, 2]),  # a tolerance that is used up comes back with the next doubling only
        ("xx...xx", [8, 4, 4, 4, 8, 8, 4]),
        ("..x...", [8, 8, 8, 8, 8, 16]),
    ],
)
def test_overflows_halve_it_and_windows_without_one_double_it(overflows: str, expected: list[float]) -> None:
    assert _scales(overflows) == expected


@pytest.mark.parametrize("overflows", ["xx.x.xx...x....x.x.x..xx", "x.x.x.xx..x...xx", "...x..xx.xx....."])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_it_is_that_of_deepspeed(overflows: str, consecutive: bool, hysteresis: int) -> None:
    scaler = LossScaler(
        initial_scale_power=20, loss_scale_window=3, hysteresis=hysteresis, consecutive_hysteresis=consecutive
    )
    theirs = []
    for one in overflows:
        scaler.update(one == "x")
        theirs.append(scaler.scale)
    options = LossScaleOptions(start=2.0**20, window=3, hysteresis=hysteresis, consecutive=consecutive)
    assert _scales(overflows, options) == theirs


def test_a_static_one_stays() -> None:
    assert _scales("xx....", OPTIONS.model_copy(update={"dynamic": False})) == [8] * 6


def test_a_loss_of_float16_bounds_it() -> None:
    options = OPTIONS.model_copy(update={"start": 2.0**16})
    assert _scales("...x..x", options, "float16") == [2.0**15] * 6 + [2.0**14]


def run(pef: Path, *flags: object, steps: int = 2, **scale: object) -> Result:
    """`sambasim run` with these settings of the loss scale."""
    sets = [word for name, value in scale.items() for word in ("--set", f"training.loss_scale.{name}={value}")]
    words = ["--pef", pef, "--no-evaluate", "--steps", steps, *sets, *flags]
    return CliRunner().invoke(run_command, [str(word) for word in words])


def error_of(result: Result) -> NumericsError:
    assert isinstance(result.exception, NumericsError), result.output
    return result.exception


def records(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


OVERFLOWING = 2.0**24


def test_below_the_minimum_the_run_ends(pef: Path) -> None:
    """And the command of the error shows where the overflow begins."""
    scale = {"start": OVERFLOWING, "minimum": OVERFLOWING}
    error = error_of(run(pef, steps=3, **scale))
    assert error.what == "the gradients of step 1 are not finite in float16, at the smallest loss scale, 1.67772e+07"
    assert "--set training.loss_scale.dynamic=false --debug-numerics" in str(error.remedy)
    origin = error_of(run(pef, "--debug-numerics", steps=3, dynamic="false", **scale))
    assert "gradient" in origin.what
    assert "inf" in origin.what


def test_a_loss_that_is_never_finite_trains_nothing(pef: Path, tmp_path: Path) -> None:
    weights = {name: torch.full_like(one, torch.nan) for name, one in _train(pef, tmp_path, 2.0**10, 1)[1].items()}
    save_file(weights, tmp_path / "nan.safetensors")
    metrics = tmp_path / "metrics"
    flags = ("--on-nonfinite", "skip", "--metrics", metrics, "--weights", tmp_path / "nan.safetensors")
    error = error_of(run(pef, *flags))
    assert error.what.startswith("nothing was trained: in all 2 steps the loss or the gradients")
    scales = [record["loss_scale"] for record in records(metrics) if record["kind"] == "step"]
    assert scales == [2.0**16] * 2, "it is not the scale's fault"


@pytest.mark.parametrize(("start", "scale"), [(512.0, 2.0**9), (256.0, 2.0**8)])
def test_a_resumed_run_goes_on_with_the_scale_unless_it_sets_another(
    pef: Path, tmp_path: Path, start: float, scale: float
) -> None:
    checkpoints, metrics = ("--checkpoint-dir", tmp_path / "checkpoints"), tmp_path / "metrics"
    assert run(pef, *checkpoints, start=512.0, window=3).exit_code == 0
    again = run(pef, *checkpoints, "--resume", "--metrics", metrics, steps=4, start=start, window=3)
    assert again.exit_code == 0
    scales = [record["loss_scale"] for record in records(metrics) if record["kind"] == "step"]
    assert scales == [scale, 1024.0 if start == 512.0 else scale]


@pytest.mark.parametrize("flag", [["--debug-numerics"], ["--on-nonfinite", "skip"]])
def test_an_overflow_is_no_error_of_numerics(pef: Path, flag: list[str]) -> None:
    result = run(pef, "--json", *flag, start=OVERFLOWING)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["skipped_steps"] == 2


def test_a_static_scale_that_trains_nothing_is_an_error(pef: Path) -> None:
    error = error_of(run(pef, start=OVERFLOWING, dynamic="false"))
    assert error.what.startswith("nothing was trained: in all 2 steps the loss or the gradients")


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = ("optimizer.name=adamw", "optimizer.lr=0.003", "compile.dtype=fp16", "training.loss_scale.hysteresis=1")
    cleared = ("optimizer.momentum=", "optimizer.nesterov=", "optimizer.weight_decay=")
    return compile_from_options(
        example_options("logistic_regression", tmp_path_factory.mktemp("fp16"), *cleared, *chosen)
    ).path


def test_only_master_weights_can_unscale_gradients(pef: Path) -> None:
    program = read(pef).program
    training_step(program)
    narrow = tuple(replace(one, states=one.states[1:]) for one in program.optimizers)
    with pytest.raises(InvariantError, match="the loss is scaled, and gradients are not all checked and unscaled"):
        training_step(replace(program, optimizers=narrow))


def _train(pef: Path, folder: Path, start: float, steps: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    metrics, weights = folder / "metrics", folder / "w.safetensors"
    result = run(pef, "--metrics", metrics, "--save", weights, steps=steps, start=start)
    assert result.exit_code == 0, result.output
    return records(metrics), load_file(weights)


def test_a_step_that_overflows_is_skipped(pef: Path, tmp_path: Path) -> None:
    (step, summary), weights = _train(pef, tmp_path, OVERFLOWING, steps=1)
    assert (step["loss_scale"], step["grad_norm"]) == (OVERFLOWING, None)
    assert (summary["loss_scale"], summary["skipped_steps"]) == (2.0**23, 1)
    stored, symbols = map_weights(pef), read(pef).program.symbols
    assert weights.keys() == {one.torch_names[0] for name, one in symbols.items() if name in stored}
    assert all(torch.equal(weights[symbols[name].torch_names[0]], stored[name]) for name in stored)


def test_the_scale_changes_no_bit_of_what_does_not_overflow(pef: Path, tmp_path: Path) -> None:
    """The loss is multiplied by a power of two, and gradients are divided by it in float32."""
    (first, *_), weights = _train(pef, tmp_path, 2.0**10, steps=3)
    (_, *_), others = _train(pef, tmp_path, 2.0**12, steps=3)
    assert first["loss_scale"] == 1024
    assert all(torch.equal(weights[name], others[name]) for name in weights)
