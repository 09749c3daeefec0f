"""What is told of a step that torch cannot trace: no advice of torch's own, a line of the model, and a remedy."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.explain import explained, tracer_error
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


def test_of_torchs_hints_the_first_is_told_that_is_for_the_users_of_sambasim() -> None:
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


class Plain(nn.Module):
    """Has nothing that a graph could not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x).mean()
        return result


def test_an_error_without_a_line_is_told_with_that_of_the_forward() -> None:
    step = TrainingStep(Plain(), ["x"], None, by_keyword=False)
    told = explained(CaptureError("no line"), step, [torch.randn(2, 4)], None)
    assert told.where is not None
    assert told.where.startswith(f"{__file__}:")
    assert "def forward" in told.where
    elsewhere = explained(CaptureError("a line", where="model.py:3: y"), step, [torch.randn(2, 4)], None)
    assert elsewhere.where == "model.py:3: y"
