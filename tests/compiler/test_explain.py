"""Errors for a step that cannot be captured: every obstacle with its line and a remedy that a test applies."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture import asked_values, explain, state, trial
from sambasim.compiler.capture.explain import Obstacle, all_occurrences, explained, obstacles, raised
from sambasim.compiler.capture.state import Observer
from sambasim.compiler.capture.step import Example, TrainingStep
from sambasim.errors import CaptureError
from tests.state.all_cases import CASES

OPERATORS = "rewrite the line with PyTorch's own operators on tensors"


def remedies_of_the_compiler() -> Iterator[tuple[str, str]]:
    named = (one for module in (explain, trial, state, asked_values) for one in vars(module).values())
    rows = (one for _, one in (*explain._ASKING, *explain._CHANGING, *explain._RAISED))
    for obstacle in dict.fromkeys(one for one in (*named, *rows) if isinstance(one, Obstacle)):
        yield obstacle.what, obstacle.rewrite
    yield from ((f"_REWRITES[{kind!r}]", rewrite) for kind, rewrite in explain.REWRITES.items())
    yield "_FIRST_CALL", explain.FIRST_CALL


@pytest.mark.parametrize(("name", "remedy"), list(remedies_of_the_compiler()))
def test_each_remedy_is_applied_by_a_case(name: str, remedy: str) -> None:
    assert any(remedy in case.says and case.rewritten for case in CASES.values()), name


def test_each_obstacle_is_found() -> None:
    rows = (*explain._ASKING, *explain._CHANGING, *explain._RAISED)
    of_state = (explain.DIFFERS, explain.GENERATOR, explain.SEEDED, explain.MADE)
    unfound = [
        name
        for name, value in vars(explain).items()
        if isinstance(value, Obstacle) and value not in [*of_state, *(obstacle for _, obstacle in rows)]
    ]
    assert unfound == []


def error_of(function: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught, raised("training step"):  # noqa: PT011
        function()
    return caught.value


def raises(text: str) -> Callable[[], object]:
    def fails() -> None:
        raise RuntimeError(text)

    return fails


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "PyTorch raises RuntimeError"),
        ("INTERNAL ASSERT FAILED at x.cpp:3, please report a bug to PyTorch. ", "PyTorch raises RuntimeError"),
        ("Cannot do it. See https://pytorch.org/docs for more.\n\nAnd more", "Cannot do it."),
    ],
)
def test_no_message_sends_the_user_to_another_project(text: str, what: str) -> None:
    error = error_of(raises(text))
    assert isinstance(error, CaptureError)
    assert (error.what, error.remedy) == (f"the training step cannot be captured: {what}", OPERATORS)
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+: raise RuntimeError\(text\)", error.where or "")


def test_what_torch_raises_is_an_error_of_capture_and_a_bug_of_sambasim_is_none() -> None:
    assert isinstance(error_of(lambda: torch.zeros(2) + torch.zeros(3)), CaptureError)
    bug = error_of(lambda: all_occurrences(None, training=True))  # type: ignore[arg-type]
    assert not isinstance(bug, CaptureError)


def test_code_of_a_library_is_named_beside_the_users_line_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "scaling.py").write_text("def scaled(x):\n    return x / x.max().item()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    scaled = importlib.import_module("scaling").scaled

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(super().forward(x)).mean()  # here

    step = TrainingStep(Scaled(4, 1), X, None)
    error = explained(CaptureError("first"), step, Observer([step], [torch.ones(2, 4)]).run()[0][step].recording)
    assert str(error.where).endswith("# here")
    assert str(error.remedy).startswith(
        f"{folder}/scaling.py:2: return x / x.max().item() is code of a library: choose settings that do not run it; "
    )


X = Example({"x": torch.ones(2, 4)})


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
    step, x = TrainingStep(Obstinate(), X, None), torch.randn(2, 4)
    call = Observer([step], [x]).run()[0][step].recording
    assert [(occurrence.where.rpartition("# ")[2], occurrence.obstacle.what) for occurrence in obstacles(call)] == [
        ("1", "a trained parameter that is changed in place"),
        ("2", "a trained parameter that is changed in place"),
        ("3", "an input that is changed in place"),
        ("4", "a branch on the value of a tensor"),
        ("5", "a branch on the value of a tensor"),
        ("6", "a branch on the value of a tensor"),
        ("7", "the value of a tensor as a Python number"),
        ("7", "a shape that depends on the values of a tensor"),
    ]
    assert all(occurrence.where.startswith(f"{__file__}:") for occurrence in obstacles(call))
    error = explained(CaptureError("first"), step, call)
    assert error.what.startswith("the training step cannot be captured, for 8 reasons:")
    assert "and 2 more lines" in error.what


def test_a_sound_model_has_no_obstacles() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.BatchNorm1d(4), nn.Dropout(0.5))
    step = TrainingStep(nn.Sequential(model, Mean()), X, None)
    assert obstacles(Observer([step], [torch.randn(2, 4)]).run()[0][step].recording) == []


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()
