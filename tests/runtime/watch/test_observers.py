"""Which calls an observer is told of, and what a rank writes to the status file in the course of a step."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sambasim.ir.graph import Graph, Node, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.watch.observer import SpanArgs, StepObserver, report_spans, span
from sambasim.runtime.watch.status_file import StatusFile, StepStatus


class Wire:
    def _length(self, words: str) -> SpanArgs:
        return {"length": len(words)}

    @span(Track.COLLECTIVES, "send", _length)
    def send(self, words: str) -> str:
        if not words:
            raise ValueError("nothing to send")
        return words.upper()

    @span(Track.COPIES, "copy")
    def copy(self) -> None:
        pass

    @span(Track.COLLECTIVES, "wait", detailed=False)
    def wait(self) -> None:
        pass

    def use(self) -> None:
        assert self.send("abc") == "ABC"
        self.copy()
        self.wait()


class Spans(StepObserver):
    def __init__(self, *, detailed: bool) -> None:
        self.detailed = detailed
        self.begun: list[str] = []
        self.ended: list[tuple[int, str, SpanArgs]] = []

    def span_begins(self, replica: int, track: Track, name: str) -> None:
        self.begun.append(name)

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        self.ended.append((replica, name, args))


@pytest.mark.parametrize(
    ("detailed", "ended"),
    [(True, [(7, "send", {"length": 3}), (7, "copy", {})]), (False, [(7, "send", {}), (7, "wait", {})])],
)
def test_an_observer_gets_the_spans_of_its_kind_until_another_one_comes(
    detailed: bool, ended: list[tuple[int, str, SpanArgs]]
) -> None:
    wire, before, spans = Wire(), Spans(detailed=True), Spans(detailed=detailed)
    report_spans(wire, before, 1)
    report_spans(wire, spans, 7)
    wire.use()
    report_spans(wire, None, 7)
    wire.use()
    assert spans.ended == ended
    assert spans.begun == [name for _, name, _ in ended]
    assert before.begun == []


def test_a_call_that_fails_ends_its_span() -> None:
    wire, spans = Wire(), Spans(detailed=False)
    report_spans(wire, spans, 0)
    with pytest.raises(ValueError, match="nothing to send"):
        wire.send("")
    assert (spans.begun, spans.ended) == (["send"], [(0, "send", {})])


def test_each_phase_of_a_step_is_written_before_it_begins(tmp_path: Path) -> None:
    kinds = (SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT)
    sections = tuple(Section(index, kind, f"{kind}_0", index, index + 1) for index, kind in enumerate(kinds))
    nodes = (Node("a", "aten.t.default"), Node("b", "aten.t.default"), Node("c", "opt.sgd", ("group_0",)))
    program = cast(Program, SimpleNamespace(leading=Graph("training", (), nodes, (), {}, sections)))
    status = StatusFile.create([tmp_path], "b.txt", 1)
    status.activity(0).begin(0, "here", 1)
    step = StepStatus(status.activity(0), program)
    written: list[str] = []

    def note() -> None:
        (line,) = status.ranks()
        written.append(f"{line.state}: {line}")

    step.step_begins(16)
    for micro_step in range(2):
        step.batch_begins(0, micro_step)
        note()
        step.pass_begins(0, micro_step)
        note()
        for ended in (sections[:1], sections[1:2]):
            step.sections_end(0, ended, 0)
            note()
        step.pass_ends(0, 0.5)
        note()
    step.span_begins(0, Track.COLLECTIVES, "REDUCE")
    note()
    step.span_ends(0, Track.COLLECTIVES, "REDUCE", 0, {})
    step.sections_end(0, sections[2:], 0)
    note()
    step.step_ends(16, None)
    note()
    of_pass = [
        ("running", "reading data"),
        ("running", "section 1 of 3 (FWD_0)"),
        ("running", "section 2 of 3 (BCKWD_0)"),
        ("running", "section 2 of 3 (BCKWD_0)"),
        ("waiting", "waiting for peers"),
    ]
    synced = [("waiting", "sync with peers: REDUCE"), ("waiting", "waiting for peers")]
    numbered = ["step 17"] * 6 + ["step 17, micro-step 2"] * 6 + ["step 17"]
    lines = [*of_pass, *of_pass, *synced, ("running", "reporting the step")]
    assert written == [f"{state}: {step}, {doing}" for step, (state, doing) in zip(numbered, lines, strict=True)]
