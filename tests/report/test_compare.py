"""Comparing runs, by recordings of digests or metrics files, tensors bit by bit, and PEFs."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from sambasim.commands.difference import compare_pefs
from sambasim.errors import ArtifactError
from sambasim.pef import PefDocument, write
from sambasim.records.digests import RecordedRun, StepDigests, ValueDigest, read_recording
from sambasim.records.metrics import RunRecords, StepRecord, SummaryRecord
from sambasim.report.compare import compare_metrics, comparison, tensor_difference
from sambasim.report.compare.recordings import compare_runs
from sambasim.report.compare.tensors import compare_tensors
from sambasim.report.tables import Row
from tests.pef.samples import sample_document, sample_weights
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


def compared(
    tmp_path: Path, a: Replicas, b: Replicas, run_b: RecordedRun | None = None, run_a: RecordedRun | None = None
) -> Row:
    folders = write_recording(tmp_path / "a", a, run_a), write_recording(tmp_path / "b", b, run_b)
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
    run_b = a_run(last_step=40, threads=2, options={"optimizer.lr": 0.2, "training.seed": 0})
    console = Console(width=200, force_terminal=False, highlight=False)
    with console.capture() as captured:
        for part in comparison(compared(tmp_path, ours, theirs, run_b, a_run(last_step=40))):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("fact", "told"),
    [
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
    found = compared(tmp_path, {0: [STEP]}, {0: [STEP, a_step(2)]}, run_a=a_run(last_step=40))
    assert not found.equal
    assert found.verdict == "equal as far as both have recorded: 1 step, 1 replica, 5 digests"
    assert found.notes == ["A ends after step 1, and was to record up to step 40", "B ends after step 2"]
    both = [STEP, a_step(2)]
    found = compared(tmp_path / "replica", {0: both, 1: both}, {0: both[:1], 1: both})
    assert not found.equal
    assert "replica 0 of B ends after step 1" in found.notes
    with pytest.raises(ArtifactError, match="replica 1 has no recorded step") as refused:
        compared(tmp_path / "none", {0: [STEP], 1: [STEP]}, {0: [STEP], 1: []})
    assert refused.value.where == str(tmp_path / "none" / "b" / "replica-1.jsonl")


def test_what_only_one_run_has_is_counted_and_its_begin_is_compared_with_the_end_before(tmp_path: Path) -> None:
    found = compared(tmp_path / "alone", {0: [STEP]}, {0: [a_step(1, changed={"net__relu": None})]})
    assert (found.equal, found.only_in_a, found.only_in_b, found.first) == (False, 1, 0, None)
    assert found.notes[0] == "1 digest of common steps only in A, without a counterpart by name"
    only_parameters = dict.fromkeys(("x", "net__relu", "net__loss", "net__w__grad"))
    begins = a_step(1, changed={**only_parameters, "net__w": changed(PARAMETER)}, begins=True)
    found = compared(tmp_path, {0: [STEP, a_step(2)]}, {0: [begins, a_step(2)]})
    assert found.verdict.startswith("they first differ before step 2, replica 0: parameter net__w")
    assert (found.only_in_a, found.steps, found.digests) == (0, 1, 6)


def test_the_first_loss_that_differs_is_named_and_times_are_not_compared() -> None:
    def records(*losses: float, summary: SummaryRecord | None = None, step_s: float = 1.0) -> RunRecords:
        steps = (
            StepRecord(step=number, epoch=1, loss=loss, lr=0.1, step_s=step_s, sync_s=0.0, samples_per_s=1.0)
            for number, loss in enumerate(losses, 1)
        )
        return RunRecords(tuple(steps), (), summary)

    def compared_metrics(a: RunRecords, b: RunRecords) -> Row:
        return compare_metrics(("a.jsonl", a), ("b.jsonl", b))

    found = compared_metrics(records(3.0, 2.0), records(3.0, 2.0, step_s=9.0))
    assert found.verdict == "equal: losses of 2 steps, as far as both go"
    found = compared_metrics(records(3.0, 2.0, 1.0), records(3.0, 2.5, math.nan))
    assert not found.equal
    assert found.verdict == "they first differ at step 2: loss 2.0 and 2.5, 2.0e-01 apart"
    assert [(row.step, row.a, row.b) for row in found.losses] == [(2, 2.0, 2.5), (3, 1.0, None)]
    also = records(3.0)
    also.steps[0].logged["ce"] = 1.5
    assert compared_metrics(records(3.0), also).verdict == "they first differ at step 1: logged ce None and 1.5"
    summary = a_run_with_metrics().summary
    assert summary is not None
    other = summary.model_copy(update={"threads": 7, "weights_sha256": "0" * 64})
    found = compared_metrics(records(3.0, summary=summary), records(2.0, summary=other))
    assert found.verdict.startswith(
        "not comparable bit by bit: threads 1 and 7; they first differ at step 1: loss 3.0 and 2.0"
    )
    assert [fact.name for fact in found.results] == ["weights_sha256"]


def apart(a: Tensor, b: Tensor) -> Row | None:
    common, found = compare_tensors({"w": a}, {"w": b})
    assert common == 1
    return found[0] if found else None


def f32(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


FAR = torch.zeros((1 << 20) + 3)
"""More than is compared at once."""


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, math.nan, -0.0, math.inf], [1.0, math.nan, -0.0, math.inf], ""),
        (f32(0x7FC00000), f32(0x7FC00001), "1 of 1 elements, 1 of them not finite"),
        ([0.0, 1.0], [-0.0, 1.0], "1 of 2 elements, by 0 at most (relative 0), 0 ULPs"),
        ([100.0, 1.0, 5.0], [101.0, 1.5, 5.0], "2 of 3 elements, by 1 at most (relative 0.33), 4,194,304 ULPs"),
        (FAR, torch.cat([FAR[1:], torch.tensor([2.0])]), "1 of 1,048,579 elements, by 2 at most (relative 1), "),
    ],
)
def test_the_largest_differences_are_told_each_by_itself(a: Tensor, b: Tensor, expected: str) -> None:
    found = apart(torch.as_tensor(a), torch.as_tensor(b))
    assert bool(found) == bool(expected)
    assert found is None or tensor_difference(found).startswith(expected)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, FLOATS)
def test_ulps_count_the_numbers_between(a: float, b: float) -> None:
    """By walking the integers in the order of the numbers, as IEEE 754 lays them out."""
    bits = [struct.unpack("<I", struct.pack("<f", abs(x)))[0] for x in (a, b)]
    steps = abs(bits[0] - bits[1]) if math.copysign(1.0, a) == math.copysign(1.0, b) else sum(bits)
    found = apart(torch.tensor([a]), torch.tensor([b]))
    assert (found.largest_ulps if found else 0) == steps


def test_what_is_missing_or_of_another_type_is_told_in_order() -> None:
    ours = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(3)}
    theirs = {"c": torch.zeros(3, dtype=torch.float64), "d": torch.zeros(1), "b": torch.zeros(1, 2)}
    common, found = compare_tensors(ours.items(), theirs)
    assert common == 2
    assert [f"{difference.name}: {tensor_difference(difference)}" for difference in found] == [
        "a: only in A, float32[2]",
        "b: float32[2] in A, float32[1, 2] in B",
        "c: float32[3] in A, float64[3] in B",
        "d: only in B, float32[1]",
    ]


def compared_pefs(folder: Path, document: PefDocument) -> Row:
    """The sample, and what it has become."""
    paths = folder / "a.pef", folder / "b.pef"
    write(paths[0], sample_document(), sample_weights())
    write(paths[1], document, sample_weights())
    found = compare_pefs(*paths)
    assert not found.equal
    return found


def with_nodes(number: int, **changes: Any) -> PefDocument:
    """The sample with another node."""
    document = sample_document()
    graph, nodes = document.program.leading, list(document.program.leading.nodes)
    nodes[number] = replace(nodes[number], **changes)
    return document.only(program=replace(document.program, training=replace(graph, nodes=tuple(nodes))))


def test_the_first_option_or_operator_that_differs_is_told_and_a_name_is_no_difference(tmp_path: Path) -> None:
    document = replace(sample_document(), compile_options={"batch_size": 4, "data_parallel": True, "world_size": 3})
    found = compared_pefs(tmp_path, document)
    assert found.verdict == "they differ in the options: compile.world_size 2 and 3"
    assert (found.symbols, found.graphs, found.weights) == ([], [], [])
    found = compared_pefs(tmp_path, with_nodes(2, operator="aten._softmax.default"))
    assert found.graphs == [
        "the training graph: operator 2, section 0 FWD logreg__fwd_0: "
        "A has `aten._log_softmax.default`: "
        "`%log_softmax = aten._log_softmax.default(%addmm, 1, False) : float32[4, 2]`, "
        "and B `aten._softmax.default`: `%log_softmax = aten._softmax.default(%addmm, 1, False) : float32[4, 2]`"
    ]
    assert found.verdict == f"they differ in {found.graphs[0]}"
    named = compared_pefs(tmp_path, with_nodes(0, name="other", source=None))
    assert named.verdict == "they differ only in layout or metadata"
