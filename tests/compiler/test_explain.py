"""Errors for a step that cannot be captured: every obstacle with its line and a remedy, before a capture
would lose something silently, and nothing of the model is changed."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.explain import Watch, explained, tracer_error
from sambasim.compiler.step import TrainingStep
from sambasim.errors import CaptureError

FALLBACK = "rewrite the line with PyTorch's own operators on tensors"
FOREIGN = re.compile(r"https?:|issue|\bbugs?\b|please report|_dynamo|github|torch\.compile", re.IGNORECASE)

UNSUPPORTED = """Attempted to call function marked as skipped
  Explanation: Dynamo does not know how to trace the builtin `time.sleep.` This function is a Python builtin.
  Hint: If it is a Python builtin, please file an issue on GitHub so the PyTorch team can add support for it.
  Hint: Please use `torch.compiler.allow_in_graph`.
  Hint: Replace it by an operator of PyTorch.

  Developer debug context: module: time, qualname: sleep

 For more details about this graph break, please visit: https://meta-pytorch.github.io/compile-graph-break-site/gb0007.html

from user code:
   File "/app/model.py", line 12, in forward
    time.sleep(1)
"""


def test_the_remedy_is_the_first_of_torchs_hints_that_helps_users_of_sambasim() -> None:
    error = tracer_error("training step", RuntimeError(UNSUPPORTED))
    assert error.what == (
        "the training step cannot be captured: Attempted to call function marked as skipped\n"
        "    PyTorch's tracer does not know how to trace the builtin `time.sleep.` This function is a Python builtin."
    )
    assert error.where == "/app/model.py:12: time.sleep(1)"
    assert error.remedy == "Replace it by an operator of PyTorch."


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("", "PyTorch raises RuntimeError", FALLBACK),
        (
            "INTERNAL ASSERT FAILED at x.cpp:3, please report a bug to PyTorch. ",
            "PyTorch raises RuntimeError",
            FALLBACK,
        ),
        ("Cannot do it. See https://pytorch.org/docs for more.", "Cannot do it.", FALLBACK),
        ("No\n  Hint: Set torch._dynamo.config.x=True\n  Hint: \n", "No", FALLBACK),
        ("No\n  Hint: This is likely to be a Dynamo bug. Please report an issue to PyTorch.", "No", FALLBACK),
        ("No\n  Hint: Move the tensor out of the loop.", "No", "Move the tensor out of the loop."),
    ],
)
def test_no_message_sends_the_user_to_another_project(text: str, what: str, remedy: str) -> None:
    error = tracer_error("evaluation graph", RuntimeError(text))
    assert (error.what, error.remedy) == (f"the evaluation graph cannot be captured: {what}", remedy)


def test_nothing_that_torchs_tracer_may_say_does() -> None:
    registry = Path(torch.__file__).parent / "_dynamo" / "graph_break_registry.json"
    entries = [entry for versions in json.loads(registry.read_text()).values() for entry in versions]
    assert len(entries) > 400
    for entry in entries:
        hints = "".join(f"  Hint: {hint}\n" for hint in entry["Hints"])
        error = tracer_error(
            "step", RuntimeError(f"{entry['Gb_type']}\n  Explanation: {entry['Explanation']}\n{hints}")
        )
        assert error.remedy
        assert not FOREIGN.search(f"{error.what} {error.remedy}"), error


class Obstinate(nn.Module):
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


def test_all_obstacles_are_found_in_order_each_with_its_line() -> None:
    model, x = Obstinate(), torch.randn(2, 4)
    with Watch(model, [x]) as watch:
        model(x)
    assert [(finding.where.rpartition("# ")[2], finding.obstacle.what) for finding in watch.findings] == [
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
