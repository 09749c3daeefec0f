"""Where NaN and infinities begin: the batch, the parameter, the operator or the update that is named."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sambasim.errors import NumericsError
from sambasim.options.compile import compile_options
from tests.support.compiled import compile_from_options
from tests.support.damaged import compiled
from tests.support.runs import run_options, train_alone

_HERE = "tests.runtime.test_debug_numerics"


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


def _train(pef: Path, **asked: Any) -> str:
    """The digest of the state after three steps."""
    options = run_options(pef, **{"training": {"steps": 3}, "debug_numerics": True, **asked})
    return train_alone(pef, options).state_sha256


def _error(pef: Path, **asked: Any) -> NumericsError:
    with pytest.raises(NumericsError) as raised:
        _train(pef, **asked)
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
    error = _error(_deep(tmp_path, kind))
    assert re.search(what, error.what), error.what
    assert "on replica 0, step 1, micro-step 1: it begins in section" in error.what
    assert "of the module head: " in error.what
    assert re.search(f"test_debug_numerics.py:.*{re.escape(line)}", error.where or ""), error.where


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("numerics"), "optimizer.name=adamw", "optimizer.lr=0.01")


@pytest.mark.parametrize(
    ("damage", "replicas", "expected"),
    [
        (
            {"inputs": {"9": "nan"}},
            1,
            "step 3, micro-step 1: the input x of the batch of replica 0 holds nan (sample 9)",
        ),
        ({"inputs": {"6": "inf", "4": "-inf"}}, 1, "input x of the batch of replica 0 holds inf (samples 4, 6)"),
        ({"targets": {"6": "nan"}}, 1, "the input target of the batch of replica 0 holds nan (sample 6)"),
        ({"inputs": {"9": "nan"}}, 2, "batch of replica 1 holds nan (sample 9)"),
    ],
)
def test_a_batch_is_named_with_its_samples(damage: dict[str, Any], replicas: int, expected: str, pef: Path) -> None:
    assert expected in _error(pef, data={"args": damage}, emulate_replicas=replicas).what


def test_samples_have_the_numbers_that_the_data_set_knows_them_by(pef: Path) -> None:
    """Shuffled, some held out, several micro-steps, several epochs: only one sample is not finite."""
    data = {"args": {"inputs": {"30": "nan"}}, "shuffle": True, "evaluation_fraction": 0.25}
    error = _error(pef, data=data, training={"epochs": 9, "accumulation_steps": 3})
    assert re.search(r"micro-step [123]: .* holds nan \(sample 30\): 1 nan of 32 elements", error.what), error.what


def test_parameters_that_were_not_finite_before_are_named(pef: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    _train(pef, save=weights)
    tensors = load_file(weights)
    tensors["last.weight"][0, 3] = torch.nan
    save_file(tensors, weights)
    expected = _error(pef, weights=weights).what
    assert "the parameter last.weight held nan before the step: 1 nan of 16 elements" in expected


def test_an_update_that_overflows_is_named(pef: Path) -> None:
    error = _error(pef, optimizer={"lr": 1e38})
    assert re.search(r"the update of step 1 made inf of the parameter \S+: \d+ inf of \d+ elements", error.what)


@pytest.mark.parametrize(("accumulation", "replicas"), [(1, 1), (2, 2)])
def test_the_bits_of_a_run_that_stays_finite_are_the_same(accumulation: int, replicas: int, pef: Path) -> None:
    asked = {"training": {"steps": 5, "accumulation_steps": accumulation}, "emulate_replicas": replicas}
    assert _train(pef, **asked) == _train(pef, **asked, debug_numerics=False)


def test_infinities_that_come_to_nothing_are_no_findings(tmp_path: Path) -> None:
    """Masks of -inf, kept and made, in a model whose loss and gradients stay finite."""
    assert _train(_deep(tmp_path, "scaled"))
