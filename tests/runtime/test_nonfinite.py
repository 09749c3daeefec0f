"""Losses that are NaN or infinite: a run stops, leaves the step out, or goes on, as it was asked to; and the batch, the
parameter, the operator or the update is named where they begin."""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sambasim.errors import NumericsError
from sambasim.options.compile import compile_options
from sambasim.options.run import RunOptions
from sambasim.records.metrics import SummaryRecord
from sambasim.runtime.machine.process import repeatable
from sambasim.runtime.run.run_observer import MetricsFile, RunObserver
from tests.support.compiled import compile_from_options
from tests.support.damaged import BATCH, OVERFLOWS, SAMPLES, compiled
from tests.support.eager import EagerReplica
from tests.support.runs import run_options, train_alone

Damage: TypeAlias = Mapping[str, Mapping[str, str]]
STEPS = SAMPLES // BATCH
NAN: Damage = {"inputs": {"9": "nan"}}
OPTIMIZERS = {
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.dampening=0.5"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.01"),
    "clipped": ("optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.max_grad_norm=0.5"),
}


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nonfinite")
    return {name: compiled(folder, f"compile.pef_name={name}", *overrides) for name, overrides in OPTIMIZERS.items()}


def train(pef: Path, *observers: RunObserver, damage: Damage | None = None, **asked: Any) -> SummaryRecord:
    """A run, by default of one epoch, in which samples are damaged."""
    options = run_options(pef, **{"data": {"args": damage or {}}, "training": {"epochs": 1}, **asked})
    return train_alone(pef, options, *observers, command=["sambasim", "run", "--pef", "a net"])


def test_a_run_stops_after_the_step_whose_loss_is_not_finite(pefs: dict[str, Path], tmp_path: Path) -> None:
    metrics, saved = tmp_path / "m.jsonl", tmp_path / "w.safetensors"
    with pytest.raises(NumericsError) as caught:
        train(pefs["adamw"], MetricsFile(metrics), damage=NAN, metrics=metrics, save=saved)
    assert str(caught.value) == (
        "the loss of step 3 is not finite: nan\n"
        "  where: epoch 1, step 3; nothing of it was saved\n"
        "  try:   sambasim run --pef 'a net' --debug-numerics to see where it begins, or --on-nonfinite skip to go on"
    )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("step", 1), ("step", 2), ("step", 3)]
    assert not saved.exists()


def test_a_run_that_ignores_it_goes_on_to_its_end(pefs: dict[str, Path]) -> None:
    summary = train(pefs["adamw"], damage=NAN, on_nonfinite="ignore")
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
    observer, asked = Mock(RunObserver), dict[str, Any](on_nonfinite="skip", save=tmp_path / "w.safetensors")
    summary = train(pefs[optimizer], observer, damage=damage, **asked)
    facts = (summary.steps, summary.skipped_steps, summary.first_nonfinite_step)
    assert facts == (STEPS, len(skipped), min(skipped) + 1)
    notes = [call.args[0].split(",")[0] for call in observer.noted.call_args_list]
    assert notes == [f"step {step + 1} is skipped" for step in sorted(skipped)]
    if optimizer != "clipped":
        options = run_options(pefs[optimizer], data={"args": damage}, training={"epochs": 1}, **asked)
        with repeatable(1):
            eager = _eager_that_skips(pefs[optimizer], options, skipped)
        ours = load_file(tmp_path / "w.safetensors")
        assert [name for name, tensor in eager.items() if not torch.equal(ours[name], tensor)] == []
        assert all(tensor.isfinite().all() for tensor in ours.values())


def _eager_that_skips(pef: Path, asked: RunOptions, skipped: set[int]) -> dict[str, torch.Tensor]:
    eager = EagerReplica(pef, asked)
    optimizer = eager.optimizer()
    for step in range(STEPS):
        before = {name: buffer.clone() for name, buffer in eager.module.named_buffers()}
        loss = eager.differentiate(step)
        assert math.isfinite(loss) == (step not in skipped)
        if math.isfinite(loss):
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


@pytest.mark.parametrize(
    ("optimizer", "accumulation", "replicas"), [("clipped", 1, 1), ("adamw", 1, 1), ("adamw", 2, 2)]
)
def test_the_bits_of_a_run_that_stays_finite_are_the_same(
    optimizer: str, accumulation: int, replicas: int, pefs: dict[str, Path]
) -> None:
    training = {"steps": 5, "accumulation_steps": accumulation}
    asked: dict[str, Any] = {"training": training, "emulate_replicas": replicas}
    choices: list[dict[str, Any]] = [{"on_nonfinite": choice} for choice in ("stop", "skip", "ignore")]
    summaries = [train(pefs[optimizer], **asked, **choice) for choice in (*choices, {"debug_numerics": True})]
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


_HERE = "tests.runtime.test_nonfinite"


def softmax_of(x: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(hidden, float("-inf")), dim=1)


HEADS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "log": lambda x, scale, mask: torch.log(x.clamp(min=0) * scale),
    "sqrt": lambda x, scale, mask: torch.sqrt(x.clamp(min=0) * scale),  # of zero: only its gradient is not finite
    "kept mask": lambda x, scale, mask: (
        torch.exp(x * 1000) * torch.softmax(x.unsqueeze(1) * scale + mask, dim=2).sum(dim=2)
    ),
    "masked": lambda x, scale, mask: torch.exp(x.abs() * 1000) * softmax_of(x * scale, x < 0),
    "wholly masked": lambda x, scale, mask: softmax_of(x * scale, x < 100),
    "meant": lambda x, scale, mask: (x * scale).masked_fill(x < 0, float("-inf")),
    "scaled": lambda x, scale, mask: softmax_of(x * scale, x < 0) + torch.softmax(x.unsqueeze(1) + mask, 2).sum(2),
}


class Head(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.mask = nn.Buffer(torch.full((8, 8), float("-inf")).triu(1))
        self.compute = HEADS[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.scale, self.mask)


class Deep(nn.Module):
    """`kind` is the operation in the middle of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.last, self.is_meant = Head(kind), nn.Linear(8, 1), kind == "meant"

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(x)
        last: Tensor = self.last(head)
        return head.mean() if self.is_meant else last.square().mean()


def inputs() -> TensorDataset:
    """Samples that all have negative numbers, and positive ones."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(torch.cat([x[:, :6], x[:, :1].abs(), -x[:, :1].abs()], dim=1))


def _deep(folder: Path, kind: str) -> Path:
    overrides = [f"data.source={_HERE}:inputs", f"model.args.kind={kind}", "optimizer.name=sgd", "optimizer.lr=0.001"]
    flags = {"output_folder": folder, "batch_size": 4}
    return compile_from_options(compile_options(None, f"{_HERE}:Deep", overrides, flags)).path


def _origin(pef: Path, **asked: Any) -> NumericsError:
    """The error of a run, of three steps by default, that looks for it."""
    with pytest.raises(NumericsError) as raised:
        train(pef, **{"training": {"steps": 3}, "debug_numerics": True, **asked})
    return raised.value


@pytest.mark.parametrize(
    ("kind", "what", "line"),
    [
        ("log", r"the loss is .* section \d \(FWD .*aten\.log\.default makes .*: \d+ inf of 32 ", "torch.log(x"),
        ("sqrt", r"the gradient .* section \d \(BCKWD .*aten\.div\.Tensor makes .*: \d+ ", "torch.sqrt(x"),
        ("kept mask", r"the loss is .* section \d \(FWD .*aten\.exp\.default makes ", "torch.exp(x * 1000)"),
        ("masked", r"the loss is .* section \d \(FWD .*aten\.exp\.default makes ", "torch.exp(x.abs() * 1000)"),
        (
            "wholly masked",
            r"the loss .*aten\._softmax\.default makes .*: 32 nan of 32 elements",
            "torch.softmax(x.masked",
        ),
        ("meant", r"the loss is .*aten\.(masked_fill|where)\.\w+ makes .*: \d+ inf of 32 ", "masked_fill(x < 0"),
    ],
)
def test_the_operator_is_named_with_the_line_of_the_model(kind: str, what: str, line: str, tmp_path: Path) -> None:
    error = _origin(_deep(tmp_path, kind))
    assert re.search(what, error.what), error.what
    assert "on replica 0, step 1, micro-step 1: it begins in section" in error.what
    assert "of the module head: " in error.what
    assert re.search(f"test_nonfinite.py:.*{re.escape(line)}", error.where or ""), error.where


SHUFFLED = {"args": {"inputs": {"30": "nan"}}, "shuffle": True, "evaluation_fraction": 0.25}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"damage": NAN}, r"step 3, micro-step 1: the input x of the batch of replica 0 holds nan \(sample 9\)"),
        (
            {"damage": {"inputs": {"6": "inf", "4": "-inf"}}},
            r"input x of the batch of replica 0 holds inf \(samples 4, 6\)",
        ),
        ({"damage": {"targets": {"6": "nan"}}}, r"the input target of the batch of replica 0 holds nan \(sample 6\)"),
        ({"damage": NAN, "emulate_replicas": 2}, r"batch of replica 1 holds nan \(sample 9\)"),
        (
            {"data": SHUFFLED, "training": {"epochs": 9, "accumulation_steps": 3}},
            r"micro-step [123]: .* holds nan \(sample 30\): 1 nan of 32 elements",
        ),
        ({"optimizer": {"lr": 1e38}}, r"the update of step 1 made inf of the parameter \S+: \d+ inf of \d+ elements"),
    ],
)
def test_a_batch_is_named_with_its_samples_as_the_data_set_knows_them_or_an_update(
    asked: dict[str, Any], expected: str, pefs: dict[str, Path]
) -> None:
    error = _origin(pefs["adamw"], **asked)
    assert re.search(expected, error.what), error.what


def test_parameters_that_were_not_finite_before_are_named(pefs: dict[str, Path], tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    train(pefs["adamw"], save=weights)
    tensors = load_file(weights)
    tensors["last.weight"][0, 3] = torch.nan
    save_file(tensors, weights)
    expected = _origin(pefs["adamw"], weights=weights).what
    assert "the parameter last.weight held nan before the step: 1 nan of 16 elements" in expected


def test_infinities_that_come_to_nothing_are_no_findings(tmp_path: Path) -> None:
    """Masks of -inf, kept and made, in a model whose loss and gradients stay finite."""
    assert train(_deep(tmp_path, "scaled"), debug_numerics=True).first_nonfinite_step is None
