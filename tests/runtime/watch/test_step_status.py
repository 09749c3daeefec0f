"""What a rank writes in the course of a step: each of its phases, as it comes to it."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sambasim.ir.graph import Graph, Node, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.watch.status_file import StatusFile, StepStatus

KINDS = (SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT)
SECTIONS = tuple(Section(index, kind, f"{kind}_0", index, index + 1) for index, kind in enumerate(KINDS))


@pytest.fixture
def status(tmp_path: Path) -> StatusFile:
    made = StatusFile.create([tmp_path], "b.txt", 1)
    made.activity(0).begin(0, "here", 1)
    return made


def observer(status: StatusFile) -> StepStatus:
    nodes = (Node("a", "aten.t.default"), Node("b", "aten.t.default"), Node("c", "opt.sgd", ("group_0",)))
    graph = Graph("training", (), nodes, (), {}, SECTIONS)
    return StepStatus(status.activity(0), cast(Program, SimpleNamespace(leading=graph)))


def test_each_phase_of_a_step_is_written_before_it_begins(status: StatusFile) -> None:
    written: list[str] = []
    step = observer(status)

    def note() -> None:
        (line,) = status.ranks()
        written.append(f"{line.state}: {line}")

    step.step_begins(16)
    for micro_step in range(2):
        step.batch_begins(0, micro_step)
        note()
        step.pass_begins(0, micro_step)
        note()
        step.sections_end(0, SECTIONS[:1], 0)
        note()
        step.sections_end(0, SECTIONS[1:2], 0)
        step.pass_ends(0, 0.5)
        note()
    step.span_begins(0, Track.COLLECTIVES, "REDUCE")
    note()
    step.span_ends(0, Track.COLLECTIVES, "REDUCE", 0, {})
    step.sections_end(0, SECTIONS[2:], 0)
    note()
    step.step_ends(16, None)
    note()
    assert written == [
        "running: step 17, reading data",
        "running: step 17, section 1 of 3 (FWD_0)",
        "running: step 17, section 2 of 3 (BCKWD_0)",
        "waiting: step 17, waiting for peers",
        "running: step 17, reading data",
        "running: step 17, micro-step 2, section 1 of 3 (FWD_0)",
        "running: step 17, micro-step 2, section 2 of 3 (BCKWD_0)",
        "waiting: step 17, micro-step 2, waiting for peers",
        "waiting: step 17, micro-step 2, sync with peers: REDUCE",
        "waiting: step 17, micro-step 2, waiting for peers",
        "running: step 17, reporting the step",
    ]
