"""Two files of metrics: where losses part, and what came of the runs."""

import math

from sambasim.records.metrics import EvaluationRecord, RunRecords, StepRecord, SummaryRecord
from sambasim.report.compare.result import MetricsCompared
from sambasim.report.compare.runs import compare_metrics
from tests.report.test_page import a_run


def step(number: int, loss: float, step_s: float = 1.0) -> StepRecord:
    return StepRecord(step=number, epoch=1, loss=loss, lr=0.1, step_s=step_s, sync_s=0.0, samples_per_s=1.0)


def records(*losses: float, summary: SummaryRecord | None = None, accuracy: float | None = None) -> RunRecords:
    steps = tuple(step(number, loss, step_s=number / 7) for number, loss in enumerate(losses, 1))
    evaluation = EvaluationRecord(step=1, epoch=1, samples=4, loss=1.0, accuracy=accuracy, evaluation_s=0.1)
    return RunRecords(steps, (evaluation,), summary)


def compared(a: RunRecords, b: RunRecords) -> MetricsCompared:
    return compare_metrics(("a.jsonl", a), ("b.jsonl", b))


def test_times_are_not_compared() -> None:
    one = records(3.0, 2.0)
    slower = RunRecords(tuple(r.model_copy(update={"step_s": 9.0}) for r in one.steps), one.evaluations, None)
    found = compared(one, slower)
    assert found.alike
    assert found.verdict == "alike: losses of 2 steps"


def test_the_first_loss_that_differs_is_named() -> None:
    found = compared(records(3.0, 2.0, 1.0), records(3.0, 2.5, math.nan))
    assert not found.alike
    assert found.verdict == "they first differ at step 2: loss 2.0 and 2.5, 2.0e-01 apart"
    assert [(row.step, row.a, row.b) for row in found.losses] == [(2, 2.0, 2.5), (3, 1.0, None)]


def test_two_losses_that_are_no_number_are_alike() -> None:
    assert compared(records(3.0, math.nan), records(3.0, math.nan)).alike


def test_an_evaluation_that_differs_is_told() -> None:
    found = compared(records(3.0, accuracy=0.5), records(3.0, accuracy=0.75))
    assert found.verdict == "they first differ at evaluation after step 1, accuracy: 0.5 and 0.75"


def test_threads_of_the_summaries_are_said_first() -> None:
    summary = a_run().summary
    assert summary is not None
    other = summary.model_copy(update={"threads": summary.threads + 1, "weights_sha256": "0" * 64})
    found = compared(records(3.0, summary=summary), records(2.0, summary=other))
    threads = f"threads {summary.threads} and {summary.threads + 1}"
    assert found.verdict.startswith(
        f"not comparable bit by bit: {threads}; they first differ at step 1: loss 3.0 and 2.0"
    )
    assert [fact.name for fact in found.results] == ["weights_sha256"]


def test_a_run_that_ended_early_is_compared_as_far_as_it_went() -> None:
    found = compared(records(3.0), records(3.0, 2.0))
    assert not found.alike
    assert found.verdict == "alike: losses of 1 step, as far as both go"
    assert found.notes[0] == "A ends after step 1"


def test_losses_of_a_long_run_are_told_in_a_few_rows() -> None:
    found = compared(records(*(1.0 for _ in range(100))), records(*(1.0 if n < 10 else 2.0 for n in range(100))))
    assert [row.step for row in found.losses] == [11, 12, 13, 15, 19, 27, 43, 75, 100]
