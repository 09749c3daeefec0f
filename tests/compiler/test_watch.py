"""Watching an eager call: what is found, in which order, and that nothing of the model is changed by it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.explain import Watch, explained
from sambasim.compiler.step import TrainingStep
from sambasim.errors import CaptureError, ModelError


class Obstinate(nn.Module):
    """Does everything that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.linear.weight[0] = 1.0  # 1
            self.linear.weight.mul_(2)  # 2
        x.add_(1)  # 3
        h = self.linear(x)
        assert h.sum() > -1e9
        while h.sum() > 1e9:  # 4
            h = h / 2
        g = h if h.min() < 0 else -h  # 5
        if not (h > 0).any() and bool(h.max() > 0):  # 6
            g = g + 1
        return (g * int(h.numel()) * h.max().item() + x[x > 0].sum()).mean()  # 7


def _numbers(findings: Watch) -> list[tuple[str, str]]:
    return [(finding.where.rpartition("# ")[2], finding.obstacle.what) for finding in findings.findings]


def test_all_obstacles_are_found_in_order_each_with_its_line() -> None:
    model, x = Obstinate(), torch.randn(2, 4)
    with Watch(model, [x]) as watch:
        model(x)
    assert _numbers(watch) == [
        ("1", "a parameter that is changed in place"),
        ("2", "a parameter that is changed in place"),
        ("3", "an input that is changed in place"),
        ("4", "a branch on the value of a tensor"),
        ("5", "a branch on the value of a tensor"),
        ("6", "a branch on the value of a tensor"),
        ("7", "the value of a tensor as a Python number"),
        ("7", "a shape that depends on the values of a tensor"),
    ]
    assert all(finding.where.startswith(f"{__file__}:") for finding in watch.findings)


def test_a_sound_model_has_no_obstacles() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(2, 4)
    with Watch(model, [x]) as watch:
        model(x).sum().backward()
    assert watch.findings == []


def test_an_explanation_leaves_model_inputs_and_generator_as_they_were() -> None:
    model, x = Obstinate(), torch.randn(2, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before, generator = x.clone(), torch.get_rng_state()
    error = explained(CaptureError("first"), TrainingStep(model, ["x"], None, by_keyword=False), [x], None)
    assert error.what.startswith("the training step cannot be captured, for 8 reasons:")
    assert "and 2 more lines" in error.what
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_nobody_can_explain_stays_as_the_tracer_told_it() -> None:
    model, error = nn.Linear(4, 1), CaptureError("first")
    step = TrainingStep(nn.Sequential(model, nn.Flatten(0)), ["x"], None, by_keyword=False)
    assert explained(error, step, [torch.randn(1, 4)], None) is error
    with pytest.raises(ModelError, match="but a loss is one number"):
        explained(error, step, [torch.randn(2, 4)], None)
