"""Traces of real runs, by every way that replicas sync: of the right steps, well formed, and with the bits of a run
without one."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sambasim.compiler.compile import compile_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.ir.graph import Section, SectionKind
from sambasim.pef import read
from sambasim.records.metrics import SummaryRecord
from tests.mpi.bodies.trace import AHEAD_NS
from tests.support.examples import example_options
from tests.support.mpi import ROOT, can_play_hosts, run_mpi
from tests.support.trace_format import Trace, read_trace
from tests.support.whole import whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "trace.py"
STEPS, FIRST, LAST = 6, 3, 5
TRACED = LAST - FIRST + 1
MICRO_STEPS = 2
PARTS = ("mpi", "server", "servers")


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train one PEF: without a trace and with one, and the trace."""

    way: str
    sections: Sequence[Section]
    digest: str
    plain: SummaryRecord
    traced: SummaryRecord
    notes: Sequence[str]
    trace: Trace

    @property
    def ranks(self) -> int:
        return self.traced.world_size + self.traced.parameter_servers

    def of_kind(self, *kinds: SectionKind) -> list[int]:
        return [section.index for section in self.sections if section.kind in kinds]


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One of little and one of many parameters with clipping, and one of many without."""
    folder = tmp_path_factory.mktemp("trace")
    chosen = {
        "logistic_regression": (),
        "digits": ("optimizer.max_grad_norm=0.05",),
        "char_gpt": ("optimizer.max_grad_norm=",),
    }
    paths = {}
    for name, overrides in chosen.items():
        options = example_options(name, folder, *overrides)
        model = build_model(options)
        inputs, by_keyword = example_batch(model, options)
        paths[name] = compile_model(model, inputs, options, by_keyword=by_keyword).path
    return paths


@pytest.fixture(
    scope="module", params=[whole_case((1, 1)), (2, 1), whole_case((2, 2))], ids=["one", "two", "two on two hosts"]
)
def lines(
    request: pytest.FixtureRequest, pefs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Mapping[str, Any]]:
    """What a job of so many ranks, on so many hosts, printed."""
    ranks, hosts = request.param
    if hosts > 1 and not can_play_hosts():
        pytest.skip("this machine may not play several hosts")
    folder = tmp_path_factory.mktemp("traces")
    argv = [sys.executable, str(BODY), str(folder), str(STEPS), *map(str, pefs.values())]
    printed = run_mpi(ranks, argv, timeout=280, hosts=hosts).check().stdout.splitlines()
    return [json.loads(line) for line in printed if line.startswith("{")]


@pytest.fixture(scope="module")
def runs(lines: list[Mapping[str, Any]], pefs: Mapping[str, Path]) -> list[Run]:
    documents = {path.stem: read(path) for path in pefs.values()}
    found = []
    for line in lines[:-1]:
        document = documents[line["pef"]]
        assert document.program.training is not None
        found.append(
            Run(
                line["way"],
                document.program.training.sections,
                document.digest,
                SummaryRecord.model_validate(line["plain"]),
                SummaryRecord.model_validate(line["traced"]),
                line["notes"],
                read_trace(Path(line["file"]).read_text(encoding="utf-8")),
            )
        )
    return found


def test_a_trace_leaves_the_bits_of_the_run(runs: list[Run]) -> None:
    assert {run.way for run in runs} in ({"alone", "emulated"}, {"device", "mpi", "gloo", "server", "servers"})
    for run in runs:
        for one in ("weights_sha256", "state_sha256", "loss_last", "bytes"):
            assert getattr(run.plain, one) == getattr(run.traced, one), (run.way, one)


def test_it_says_what_it_is_of(runs: list[Run]) -> None:
    for run in runs:
        facts = run.trace.facts
        assert (facts["first_step"], facts["last_step"], facts["steps_of_run"]) == (FIRST, LAST, STEPS)
        assert (facts["pef_digest"], facts["replicas"]) == (run.digest, run.traced.world_size)
        assert facts["clocks"] == "one clock for all ranks"
        assert facts["spans_left_out"] == 0
        assert "CPU" in facts["device"]
        assert "SN30" in facts["device"]
        (note,) = run.notes
        assert note.startswith(f"traced steps {FIRST} to {LAST} of {STEPS} (measured): {len(run.trace.spans)} spans")


def test_each_replica_is_a_process_that_is_called_measured(runs: list[Run]) -> None:
    for run in runs:
        names = run.trace.processes
        assert list(names) == list(range(run.ranks))
        workers = [name for name in names.values() if name.startswith("replica ")]
        servers = [name for name in names.values() if name.startswith("parameter server, rank ")]
        assert (len(workers), len(servers)) == (run.traced.world_size, run.traced.parameter_servers)
        placement = run.traced.placement
        assert placement is not None
        locations = [name.partition(" as ")[2].partition(",")[0] for name in workers]
        assert locations == [
            f"node {node} RDU {rdu}" for node, rdu in zip(placement.node_of, placement.rdu_of, strict=True)
        ]
        assert all(name.endswith(", measured") for name in names.values())


def test_the_steps_and_no_others_are_there_with_their_sections_in_order(runs: list[Run]) -> None:
    for run in runs:
        processes = 1 if run.way == "emulated" else run.ranks
        steps = [one.name for process in range(processes) for one in run.trace.named("step ", process)]
        assert steps == [f"step {number}" for number in range(FIRST, LAST + 1)] * processes
        assert {one.args["step"] for one in run.trace.spans} == set(range(FIRST, LAST + 1))
        passes = run.of_kind(SectionKind.FWD, SectionKind.BCKWD) * MICRO_STEPS * TRACED
        for replica in range(run.traced.world_size):
            spans = [
                one
                for one in run.trace.spans
                if (one.process, one.track) == (replica, "sections") and one.name.startswith(("FWD", "BCKWD"))
            ]
            assert [one.args["section"] for one in spans] == passes, run.way
            assert len(run.trace.named("data", replica)) == MICRO_STEPS * TRACED


def test_the_bytes_are_those_that_the_run_counts(runs: list[Run]) -> None:
    """In each step alike, and over all ranks."""
    for run in runs:
        moved = run.traced.bytes.model_dump()
        for kind, count in moved.items():
            found = sum(one.args.get(f"{kind}_bytes", 0) for one in run.trace.named("sync and update"))
            if run.way == "device":  # some groups are read beside the backward, and parameters travel after REDUCE
                reduced = sum(one.args.get(f"{kind}_bytes", 0) for one in run.trace.named("REDUCE"))
                assert max(found, reduced) * STEPS <= count * TRACED, (run.way, kind)
                assert bool(max(found, reduced)) == bool(count), (run.way, kind)
                found = max(found, reduced) if kind == "peer" else count * TRACED // STEPS
            assert found * STEPS == count * TRACED, (run.way, kind)
        if run.way in PARTS:
            copies = {name: run.trace.named(name) for name in ("device to host", "host to device")}
            copied = {name: sum(one.args["bytes"] for one in spans) for name, spans in copies.items()}
            assert copied["device to host"] * STEPS == moved["device_to_host"] * TRACED, run.way
            assert copied["host to device"] * STEPS == moved["host_to_device"] * TRACED, run.way


def test_the_steps_of_all_ranks_are_at_one_time(runs: list[Run]) -> None:
    """No rank ends a step before every rank that it waits for has started it."""
    for run in runs:
        for number in range(FIRST, LAST + 1):
            steps = run.trace.named(f"step {number}")
            assert max(one.start_ns for one in steps) < min(one.stop_ns for one in steps), run.way


def test_clocks_that_are_apart_are_found_to_be(lines: list[Mapping[str, Any]]) -> None:
    found = lines[-1]
    assert set(found["together"]) == {0}, "ranks of one host read one clock"
    for rank, (ahead_ns, accuracy_ns) in enumerate(found["clocks"]):
        assert abs(ahead_ns - rank * AHEAD_NS) <= accuracy_ns < AHEAD_NS
