"""What a rank writes in the course of a step: each of its phases, as it comes to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from torch import Tensor

from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.replica import Replica
from sambasim.runtime.sync.interface import GradientSync
from sambasim.runtime.trace.watched import Watched
from sambasim.runtime.watch import board
from sambasim.runtime.watch.activity import UNWATCHED, OnBoard
from sambasim.runtime.watch.board import Board
from sambasim.runtime.watch.steps import follow

KINDS = (SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT)


@dataclass
class Parts:
    """What runs a step, made so that it notes what the board says whenever one of its parts is called."""

    board: Board
    steps: int = 16
    said: list[str] = field(default_factory=list)

    def note(self, *call: object) -> None:
        (line,) = self.board.lines()
        self.said.append(f"{line.state}: {line}")

    def run(self, tangent: object, *, accumulate: bool, section_done: Callable[[int], None]) -> Mapping[str, Tensor]:
        self.note()
        for count in (1, 2):
            section_done(count)
            self.note()
        return {}

    def finish(self, losses: object, wish: int = 0) -> int:
        self.note()
        return wish


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    made = board.create([tmp_path], "b.txt", 1)
    made.writer(0).begin(0, "here", 1)
    return Parts(made)


def replica_of(parts: Parts) -> Replica:
    shard = SimpleNamespace(begin_epoch=parts.note, next_batch=parts.note, accumulation_steps=2)
    return cast(Replica, SimpleNamespace(shard=shard, executable=SimpleNamespace(run=parts.run)))


def sync_of(parts: Parts) -> GradientSync:
    sync = SimpleNamespace(begin_step=parts.note, finish_step=parts.finish, reduce=parts.note)
    sync.watched = lambda: [Watched(sync, "reduce", Track.COLLECTIVES, "REDUCE")]
    return cast(GradientSync, sync)


def program() -> Program:
    sections = [SimpleNamespace(kind=kind, name=f"{kind}_0") for kind in KINDS]
    return cast(Program, SimpleNamespace(training=SimpleNamespace(sections=sections)))


def test_each_phase_of_a_step_is_written_before_it_begins(parts: Parts) -> None:
    replica, sync = replica_of(parts), sync_of(parts)
    follow(OnBoard(parts.board.writer(0)), program(), [replica], (sync, sync), lambda: parts.steps)
    replica.shard.begin_epoch(0, 16, 0)
    sync.begin_step()
    for micro_step in range(2):
        replica.shard.next_batch()
        replica.executable.run(None, accumulate=micro_step > 0, section_done=parts.note)
    assert cast(object, sync.finish_step([0.5], 3)) == 3
    parts.note()
    section = "step 17, section 1 of 3 (FWD_0)"
    assert (
        parts.said
        == [
            "running: beginning an epoch",
            "waiting: step 17, waiting for peers",
            "running: step 17, reading data",
            f"running: {section}",
            f"running: {section}",  # the sync hears of a section before the next one begins
            "running: step 17, section 2 of 3 (BCKWD_0)",
            "running: step 17, section 2 of 3 (BCKWD_0)",
            "running: step 17, backward done",
            "running: step 17, micro-step 2, reading data",
            *(line.replace("step 17,", "step 17, micro-step 2,") for line in parts.said[3:8]),
            "waiting: step 17, micro-step 2, waiting for peers",
            "running: step 17, telling of the step",
        ]
    )


def test_what_takes_long_in_a_sync_is_written_too(parts: Parts) -> None:
    sync = sync_of(parts)
    follow(OnBoard(parts.board.writer(0)), program(), [], (sync, sync), lambda: parts.steps)
    cast(SimpleNamespace, sync).reduce()
    parts.note()
    assert parts.said == ["waiting: sync with peers: REDUCE", "waiting: waiting for peers"]


def test_where_nobody_watches_a_step_runs_as_it_is(parts: Parts) -> None:
    replica, sync = replica_of(parts), sync_of(parts)
    before = [vars(replica.shard).copy(), vars(replica.executable).copy(), vars(sync).copy()]
    follow(UNWATCHED, program(), [replica], (sync, sync), lambda: parts.steps)
    assert [vars(replica.shard), vars(replica.executable), vars(sync)] == before
