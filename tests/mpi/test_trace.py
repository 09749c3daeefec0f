"""Traces of real runs, by every way that replicas sync: of the right steps, well formed, and with the bits of a run
without one."""

from dataclasses import asdict, dataclass
from typing import Any

import pytest

from sambasim.ir.graph import SectionKind
from sambasim.pef import PefDocument, read
from tests.mpi.training import WAYS, Trained, run_of, train
from tests.support.examples import CompiledExample
from tests.support.mpi import can_play_hosts
from tests.support.trace_format import Trace, read_trace
from tests.support.whole import whole_case

STEPS, FIRST, LAST = 6, 3, 5
TRACED = LAST - FIRST + 1
MICRO_STEPS = 2
PARTS = ("mpi", "server", "servers")
PASS = (SectionKind.FWD, SectionKind.BCKWD)


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train one PEF: without a trace and with one, and the trace."""

    way: str
    document: PefDocument
    plain: Trained
    traced: Trained
    trace: Trace

    @property
    def ranks(self) -> int:
        return self.traced.summary.world_size + self.traced.summary.parameter_servers


PEFS = {("logistic_regression", True), ("digits", True), ("char_gpt", False)}
"""By example, and whether gradients are clipped: one of few parameters, and two of many."""


@pytest.fixture(
    scope="module", params=[whole_case((1, 1)), (2, 1), whole_case((2, 2))], ids=["one", "two", "two on two hosts"]
)
def runs(
    request: pytest.FixtureRequest, examples: list[CompiledExample], tmp_path_factory: pytest.TempPathFactory
) -> list[Run]:
    """Every PEF by every way that so many ranks, on so many hosts, can sync."""
    ranks, hosts = request.param
    if hosts > 1 and not can_play_hosts():
        pytest.skip("this machine may not play several hosts")
    folder = tmp_path_factory.mktemp("traces")
    paths = [one.path for one in examples if one.optimizer == "adamw" and (one.example, one.clipped) in PEFS]
    ways = WAYS if ranks > 1 else {"alone": {}, "emulated": {"emulate": 3}}
    files = {(path, way): folder / f"{path.stem} {way}.json" for path in paths for way in ways}
    asked: dict[str, Any] = {"steps": STEPS, "accumulation": MICRO_STEPS}
    wanted = [run_of(file.stem, path, **asked, **ways[way]) for (path, way), file in files.items()]
    for (path, way), file in files.items():
        wanted.append(run_of(f"{file.stem} traced", path, trace=str(file), **asked, **ways[way]))
    found, documents = train(ranks, wanted, hosts=hosts), {path: read(path) for path in paths}
    return [
        Run(way, documents[path], found[file.stem], found[f"{file.stem} traced"], read_trace(file.read_text("utf-8")))
        for (path, way), file in files.items()
    ]


def test_a_trace_leaves_the_bits_of_the_run_and_says_what_it_is_of(runs: list[Run]) -> None:
    for run in runs:
        assert run.plain.outcome == run.traced.outcome, run.way
        assert run.plain.summary.bytes == run.traced.summary.bytes, run.way
        facts = run.trace.facts
        assert (facts["first_step"], facts["last_step"], facts["steps_of_run"]) == (FIRST, LAST, STEPS)
        assert (facts["pef_digest"], facts["replicas"]) == (run.document.digest, run.traced.summary.world_size)
        assert facts["clocks"] == "one clock for all ranks"
        assert facts["spans_left_out"] == 0
        assert "CPU" in facts["device"]
        assert "SN30" in facts["device"]
        (note,) = run.traced.notes
        assert note.startswith(f"traced steps {FIRST} to {LAST} of {STEPS} (measured): {len(run.trace.spans)} spans")


def test_each_replica_is_a_process_that_is_called_measured(runs: list[Run]) -> None:
    for run in runs:
        names = run.trace.processes
        assert list(names) == list(range(run.ranks))
        workers = [name for name in names.values() if name.startswith("replica ")]
        servers = [name for name in names.values() if name.startswith("parameter server, rank ")]
        assert (len(workers), len(servers)) == (run.traced.summary.world_size, run.traced.summary.parameter_servers)
        placement = run.traced.summary.placement
        assert placement is not None
        places = [name.partition(" as ")[2].partition(",")[0] for name in workers]
        pairs = zip(placement.node_of, placement.rdu_of, strict=True)
        assert places == [f"node {node} RDU {rdu}" for node, rdu in pairs]
        assert all(name.endswith(", measured") for name in names.values())


def test_the_steps_and_no_others_are_there_with_their_sections_in_order(runs: list[Run]) -> None:
    for run in runs:
        processes = 1 if run.way == "emulated" else run.ranks
        steps = [one.name for process in range(processes) for one in run.trace.named("step ", process)]
        assert steps == [f"step {number}" for number in range(FIRST, LAST + 1)] * processes
        assert {one.args["step"] for one in run.trace.spans} == set(range(FIRST, LAST + 1))
        sections = [at.index for at in run.document.program.step.sections if at.kind in PASS]
        passes = sections * MICRO_STEPS * TRACED
        for replica in range(run.traced.summary.world_size):
            own = (one for one in run.trace.spans if (one.process, one.track) == (replica, "sections"))
            numbers = [one.args["section"] for one in own if one.name.startswith(("FWD", "BCKWD"))]
            assert numbers == passes, run.way
            assert len(run.trace.named("data", replica)) == MICRO_STEPS * TRACED
        for number in range(FIRST, LAST + 1):  # no rank ends a step before every rank that it waits for has started it
            at = run.trace.named(f"step {number}")
            assert max(one.start_ns for one in at) < min(one.stop_ns for one in at), run.way


def test_the_bytes_are_those_that_the_run_counts(runs: list[Run]) -> None:
    """In each step alike, and over all ranks."""
    for run in runs:
        moved = asdict(run.traced.summary.bytes)
        for kind, count in moved.items():
            counted = sum(one.args.get(f"{kind}_bytes", 0) for one in run.trace.named("sync and update"))
            if run.way == "device":  # some groups are read beside the backward, and parameters travel after REDUCE
                reduced = sum(one.args.get(f"{kind}_bytes", 0) for one in run.trace.named("REDUCE"))
                assert max(counted, reduced) * STEPS <= count * TRACED, (run.way, kind)
                assert bool(max(counted, reduced)) == bool(count), (run.way, kind)
                counted = max(counted, reduced) if kind == "peer" else count * TRACED // STEPS
            assert counted * STEPS == count * TRACED, (run.way, kind)
        if run.way in PARTS:
            copies = {name: run.trace.named(name) for name in ("device to host", "host to device")}
            copied = {name: sum(one.args["bytes"] for one in spans) for name, spans in copies.items()}
            assert copied["device to host"] * STEPS == moved["device_to_host"] * TRACED, run.way
            assert copied["host to device"] * STEPS == moved["host_to_device"] * TRACED, run.way
