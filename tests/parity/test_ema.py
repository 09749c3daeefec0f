"""Averages of the weights: the bits of torch.optim.swa_utils, what evaluations take, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import sambasim as ss
from sambasim.errors import InvariantError, OptionError, PefError
from sambasim.ir.types import TensorType
from sambasim.ir.verify import _updates
from sambasim.runtime.values.optimizers import weight_in_average
from tests.pef.damage import change_fields

STEPS, SAMPLES, CLASSES = 10, 16, 64
Averaging = Callable[[Any, Any, Any], None]
exponential: Any = get_ema_multi_avg_fn  # untyped
mean: Any = get_swa_multi_avg_fn


def _warming(averages: Any, weights: Any, count: Any) -> None:
    torch._foreach_lerp_(averages, weights, 1 - min(0.9, (1 + int(count)) / (10 + int(count))))


def _net() -> nn.Module:
    """Every parameter has a multiple of 64 elements: others have other bits at their ends in torch's fused kernels."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 16, generator=generator), torch.randint(CLASSES, (64,), generator=generator)


@pytest.mark.parametrize(
    ("options", "averaging"),
    [
        pytest.param({"decay": 0.9}, exponential(0.9), id="exponential"),
        pytest.param({"every": 2, "start": 3}, mean(), id="mean"),
        pytest.param({"decay": 0.9, "warmup": True, "every": 3}, _warming, id="warm-up"),
        pytest.param({"decay": 0.9, "buffers": True}, exponential(0.9), id="buffers"),
        pytest.param({"decay": 0.9, "start": 99}, exponential(0.9), id="not begun"),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_averages_have_the_bits_of_torch(options: dict[str, Any], averaging: Averaging, tmp_path: Path) -> None:
    (x, y), model = _data(), _net()
    how = {f"ema.{name}": value for name, value in options.items()}
    given: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "adamw", "lr": 1e-2, "quiet": True, "check": 1}
    pef = ss.compile(_net(), (x[:SAMPLES], y[:SAMPLES]), output_folder=tmp_path, set=how, **given)
    run = ss.run(pef, ((x, y), (x, y)), steps=STEPS, threads=1, quiet=True, set={"data.shuffle": False})

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    first, too = options.get("start", 1), options.get("buffers", False)
    averaged = AveragedModel(model, multi_avg_fn=averaging, use_buffers=too)
    for step in range(1, STEPS + 1):
        at = (step - 1) % 4 * SAMPLES
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(x[at : at + SAMPLES]), y[at : at + SAMPLES]))
        optimizer.step()
        if step >= first and (step - first) % options.get("every", 1) == 0:
            averaged.update_parameters(model)
    expected = averaged.module if first <= STEPS else model
    for name, parameter in expected.named_parameters():
        assert run.ema[name].equal(parameter), name
        assert run.weights[name].equal(model.get_parameter(name)), name

    for name, buffer in averaged.module.named_buffers() if options.get("buffers") else ():
        assert not buffer.is_floating_point() or run.ema[name].equal(buffer), name

    at_end = _net()
    at_end.load_state_dict(run.ema)
    loss = run.evaluations[-1].loss
    assert loss == pytest.approx(cross_entropy(at_end.eval()(x), y).item(), abs=1e-6)


def test_the_first_average_is_the_weights_and_a_warm_up_has_a_smaller_decay() -> None:
    numbers = {"decay": 0.9, "start": 2, "every": 3, "warmup": True}
    weights = [weight_in_average(step, numbers) for step in range(1, 9)]
    assert weights == [None, 1.0, None, None, 1 - 2 / 11, None, None, 1 - 3 / 12]


def test_averages_are_verified_and_begin_at_a_later_step(tmp_path: Path) -> None:
    (x, y), how = _data(), {"ema.decay": 0.9, "ema.start": 9, "ema.buffers": True}
    given: dict[str, Any] = {"optimizer": "sgd", "output_folder": tmp_path, "quiet": True, "check": 0}
    pef = ss.compile(_net(), (x[:SAMPLES], y[:SAMPLES]), loss="cross_entropy", set=how, **given)
    program, name = pef.program, "sequential__1__running_mean$average"
    (optimizer,), arguments = program.optimizers, [one for one in program.runtime_arguments if "ema" not in one.name]
    narrow = replace(program.symbols[name], type=TensorType("float16", (64,)))
    changes: list[dict[str, Any]] = [
        {"optimizers": (optimizer, replace(optimizer, name="other", states=("momentum",)))},
        {"runtime_arguments": tuple(arguments)},
        {"symbols": {**program.symbols, name: narrow}},
    ]
    for change in changes:
        with pytest.raises(InvariantError, match="20"):
            _updates(replace(program, **change))
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "c", "threads": 1, "quiet": True}
    ss.run(pef, (x, y), steps=2, **run)
    with pytest.raises(OptionError, match=r"ema\.start = 2, and the checkpoint, after 2 steps, has no averages"):
        ss.run(pef, (x, y), steps=4, resume="newest", set={"ema.start": 2}, **run)
    change_fields(pef.path, lambda fields: fields["training_defaults"].update(ema=None))
    with pytest.raises(PefError, match="how its weights are averaged"):
        ss.run(pef.path, (x, y), steps=1, threads=1, quiet=True, trust=True)


def test_what_a_run_cannot_have_is_refused(tmp_path: Path) -> None:
    x, y = _data()
    with pytest.raises(OptionError, match="needs a decay"):
        ss.compile(_net(), (x, y), loss="cross_entropy", optimizer="sgd", set={"ema.warmup": True}, quiet=True)
    pef = ss.compile(_net(), (x, y), loss="cross_entropy", optimizer="sgd", output_folder=tmp_path, quiet=True, check=0)
    with pytest.raises(OptionError, match="needs a PEF with averages"):
        ss.run(pef, (x, y), save_ema=tmp_path / "ema.safetensors", quiet=True)
    with pytest.raises(OptionError, match="compiled into the PEF"):
        ss.run(pef, (x, y), set={"ema.decay": 0.9}, quiet=True)
