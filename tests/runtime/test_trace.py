"""Which steps a trace has, and what a trace that is full says."""

from pathlib import Path

import pytest

from sambasim.compiler.compile import compile_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.runtime.record import trace as tracing
from sambasim.runtime.record.trace import Recorder, traced_steps
from tests.support.examples import example_options
from tests.support.runs import run_options, train_alone
from tests.support.trace_format import read_trace


@pytest.mark.parametrize(
    ("asked", "steps", "traced"),
    [
        (None, 100, [2, 3, 4]),
        (None, 5, [2, 3, 4]),
        (None, 4, [1, 2, 3]),
        (None, 1, [0]),
        (1, 2, [1]),
        (1, 100, [2]),
        (7, 4, [0, 1, 2, 3]),
    ],
)
def test_the_first_steps_are_left_out_where_there_are_enough(asked: int | None, steps: int, traced: list[int]) -> None:
    assert list(traced_steps(asked, steps)) == traced


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = example_options("logistic_regression", tmp_path_factory.mktemp("trace"))
    model = build_model(options)
    return compile_model(model, example_batch(model, options), options).path


def test_a_trace_that_is_full_has_its_steps_and_says_what_is_missing(
    pef: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "Recorder", lambda: Recorder(capacity=3))
    train_alone(pef, run_options(pef, training={"steps": 6}, trace=tmp_path / "trace.json"))
    trace = read_trace((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert len(trace.spans) == 3 + 3
    assert [one.name for one in trace.named("step ")] == ["step 3", "step 4", "step 5"]
    assert trace.facts["spans_left_out"] > 10
