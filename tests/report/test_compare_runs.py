"""Comparing runs: recordings of digests, and metrics files."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from sambasim.errors import ArtifactError
from sambasim.records.digests import RecordedRun, StepDigests, ValueDigest, read_recording
from sambasim.records.metrics import RunRecords, StepRecord, SummaryRecord
from sambasim.report.compare import comparison
from sambasim.report.compare.runs import compare_metrics, compare_runs
from sambasim.report.tables import Row
from tests.report.test_page import a_run as a_run_with_metrics
from tests.support.mpi import ROOT
from tests.support.recordings import VALUES, a_run, a_step, write_recording

Replicas = Mapping[int, Sequence[StepDigests]]
RELU, GRADIENT, PARAMETER = VALUES[1], VALUES[3], VALUES[4]
STEP = a_step(1)

GOLDEN = ROOT / "tests" / "golden" / "compare_runs.txt"


def changed(value: ValueDigest, **fields: object) -> ValueDigest:
    """`value` with another digest, and what else is said."""
    return value._replace(**{"digest": "ff" * 8, **fields})  # type: ignore[arg-type]  # the fields have many types


def compared(tmp_path: Path, a: Replicas, b: Replicas, run_b: RecordedRun | None = None) -> Row:
    folders = write_recording(tmp_path / "a", a), write_recording(tmp_path / "b", b, run_b)
    return compare_runs(read_recording(folders[0]), read_recording(folders[1]))


def test_what_is_shown_of_runs_that_part(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The value of replica 1 comes before the parameter of replica 0; of equal places, replica 0 comes first."""
    other = changed(PARAMETER, norm=PARAMETER.norm)
    ours: Replicas = {0: [STEP, a_step(2), a_step(3)], 1: [STEP, a_step(2)]}
    theirs: Replicas = {
        0: [
            STEP,
            a_step(2, changed={"net__w": other}, loss=None),
            a_step(3, changed={"net__w__grad": changed(GRADIENT, norm=None, not_finite=7)}),
            a_step(4),
        ],
        1: [STEP, a_step(2, changed={"net__relu": changed(RELU, norm=4.0), "net__w": other}, loss=None)],
    }
    run_b = a_run(threads=2, options={"optimizer.lr": 0.2, "training.seed": 0})
    console = Console(width=200, force_terminal=False, highlight=False)
    with console.capture() as captured:
        for part in comparison(compared(tmp_path, ours, theirs, run_b)):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("fact", "told"),
    [
        ({"threads": 2}, "threads 1 and 2"),
        ({"cpu": "x86_64 AVX512"}, "CPU x86_64 AVX2 and x86_64 AVX512"),
        ({"exempt_from_exactness": ("--host-sync gloo: a ring",)}, "exempt --host-sync gloo: a ring in B alone"),
        ({"world_size": 4}, "world size 2 and 4"),
        ({"seed": 3, "options": {"optimizer.lr": 0.1, "training.seed": 3}}, "seed 0 and 3"),
        ({"pef_digest": "e" * 64}, "PEF net ffffffffffff and net eeeeeeeeeeee"),
    ],
)
def test_what_makes_bits_differ_by_right_is_said_first(fact: Mapping[str, object], told: str, tmp_path: Path) -> None:
    other = [a_step(1, changed={"net__w": changed(PARAMETER)})]
    found = compared(tmp_path, {0: [STEP]}, {0: other}, a_run(**fact))
    assert found.verdict.startswith(f"not comparable bit by bit: {told}; they first differ at step 1, replica 0, ")
    assert not found.other_options
    alike = compared(tmp_path / "alike", {0: [STEP]}, {0: [STEP]}, a_run(**fact))
    assert alike.equal
    assert alike.verdict == f"equal: 1 step, 1 replica, 5 digests, though {told}"


def test_of_a_run_that_died_all_steps_that_it_did_are_compared(tmp_path: Path) -> None:
    found = compared(tmp_path, {0: [STEP]}, {0: [STEP, a_step(2)]}, a_run(last_step=2))
    assert not found.equal
    assert found.verdict == "equal as far as both have recorded: 1 step, 1 replica, 5 digests"
    assert found.notes == ["A ends after step 1, and was to record up to step 40", "B ends after step 2"]
    both = [STEP, a_step(2)]
    found = compared(tmp_path / "replica", {0: both, 1: both}, {0: both[:1], 1: both}, a_run(last_step=2))
    assert not found.equal
    assert "replica 0 of B ends after step 1" in found.notes
    with pytest.raises(ArtifactError, match="replica 1 has no recorded step") as refused:
        compared(tmp_path / "none", {0: [STEP], 1: [STEP]}, {0: [STEP], 1: []})
    assert refused.value.where == str(tmp_path / "none" / "b" / "replica-1.jsonl")


def test_tensors_of_one_alone_are_counted_and_not_alike(tmp_path: Path) -> None:
    found = compared(tmp_path, {0: [STEP]}, {0: [a_step(1, changed={"net__relu": None})]})
    assert (found.equal, found.only_in_a, found.only_in_b) == (False, 1, 0)
    assert found.first is None
    assert found.notes[0] == "1 digest of common steps only in A, without a counterpart by name"


def test_what_a_run_begins_with_is_compared_with_the_end_of_the_step_before(tmp_path: Path) -> None:
    only_parameters = dict.fromkeys(("x", "net__relu", "net__loss", "net__w__grad"))
    begins = a_step(1, changed={**only_parameters, "net__w": changed(PARAMETER)}, begins=True)
    found = compared(tmp_path, {0: [STEP, a_step(2)]}, {0: [begins, a_step(2)]})
    assert found.verdict.startswith("they first differ before step 2, replica 0: parameter net__w")
    assert (found.only_in_a, found.steps, found.digests) == (0, 1, 6)


def records(*losses: float, summary: SummaryRecord | None = None, step_s: float = 1.0) -> RunRecords:
    steps = tuple(
        StepRecord(step=number, epoch=1, loss=loss, lr=0.1, step_s=step_s, sync_s=0.0, samples_per_s=1.0)
        for number, loss in enumerate(losses, 1)
    )
    return RunRecords(steps, (), summary)


def compared_metrics(a: RunRecords, b: RunRecords) -> Row:
    return compare_metrics(("a.jsonl", a), ("b.jsonl", b))


def test_the_first_loss_that_differs_is_named_and_times_are_not_compared() -> None:
    assert compared_metrics(records(3.0, 2.0), records(3.0, 2.0, step_s=9.0)).verdict == "equal: losses of 2 steps"
    found = compared_metrics(records(3.0, 2.0, 1.0), records(3.0, 2.5, math.nan))
    assert not found.equal
    assert found.verdict == "they first differ at step 2: loss 2.0 and 2.5, 2.0e-01 apart"
    assert [(row.step, row.a, row.b) for row in found.losses] == [(2, 2.0, 2.5), (3, 1.0, None)]
    summary = a_run_with_metrics().summary
    assert summary is not None
    other = summary.model_copy(update={"threads": 7, "weights_sha256": "0" * 64})
    found = compared_metrics(records(3.0, summary=summary), records(2.0, summary=other))
    assert found.verdict.startswith(
        "not comparable bit by bit: threads 1 and 7; they first differ at step 1: loss 3.0 and 2.0"
    )
    assert [fact.name for fact in found.results] == ["weights_sha256"]
