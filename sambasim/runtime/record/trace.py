"""The trace of `run --trace`: measured times of steps, and the clocks that it compares.

The first two steps are skipped if there are enough, because they include one-time work.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from sambasim.errors import MachineError, failing_with
from sambasim.files import write_whole
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Section, SectionKind
from sambasim.pef.document import WRITER
from sambasim.records.trace import TraceProcess, TraceSpan, Track, trace_json
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.plan import Plan
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import Setup, Team
from sambasim.runtime.watch.observer import SpanArgs, StepRecorder
from sambasim.units import format_seconds

MOST_SPANS = 100_000
"""Maximum per process: some tens of megabytes of JSON. Later spans are only counted."""
DEFAULT_STEPS = 3
WARM_UP_STEPS = 2
_ROUND_TRIPS = 32
_TAG = 16
_EXCHANGED = {SectionKind.REDUCE, SectionKind.GATHER}


def traced_steps(asked: int | None, steps: int, start: int = 0) -> range:
    """The traced steps of a run from `start` (from 0) to `steps`: after the warm-up steps if there are enough."""
    count = min(asked or DEFAULT_STEPS, steps - start)
    first = start + min(WARM_UP_STEPS, steps - start - count)
    return range(first, first + count)


class RunTrace(StepRecorder):
    """Traces the steps that `--trace-steps` asks for, and writes the file after the last one. Collective."""

    def __init__(self, setup: Setup, team: Team, plan: Plan, observer: RunObserver, path: Path) -> None:
        self.steps = traced_steps(setup.options.trace_steps, plan.steps, plan.start.step)
        self._setup, self._plan, self._observer, self._path = setup, plan, observer, path
        self._sync = team.transport.title
        graph = setup.program.training
        self._in_pass = len(pass_and_update(graph)[0]) if graph else 0
        self._spans: dict[int, list[TraceSpan]] = {}  # by replica
        self._left, self._left_out = MOST_SPANS, 0
        self._step = self._began_ns = 0
        self._micro_step: dict[int, int] = {}

    def begin(self, step: int) -> None:
        self._step = step + 1
        self._began_ns = perf_counter_ns()

    def end(self, step: int, epoch: int, loss: float) -> None:
        self._left = max(self._left, 1)  # the span of the step is never dropped
        self.span_ends(self._setup.ranks[0], Track.HOST, f"step {step + 1}", self._began_ns, {"epoch": epoch + 1})
        if step == self.steps[-1]:
            self._end()

    def pass_begins(self, replica: int, micro_step: int) -> None:
        self._micro_step[replica] = micro_step

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        kinds = {section.kind for section in sections}
        track = Track.COLLECTIVES if kinds <= _EXCHANGED else Track.SECTIONS
        first, last = sections[0], sections[-1]
        number = first.index if first is last else ", ".join(str(section.index) for section in sections)
        args: dict[str, int | float | str] = {"section": number}
        if first.index < self._in_pass:
            args["micro_step"] = self._micro_step.get(replica, 0)
        names = first.name if first is last else f"{first.name} … {last.name}"
        title = f"{'+'.join(dict.fromkeys(section.kind.value for section in sections))} {names}"
        self.span_ends(replica, track, title, began_ns, args)

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        stop_ns = perf_counter_ns()
        if self._left <= 0:
            self._left_out += 1
            return
        self._left -= 1
        span = TraceSpan(track, name, began_ns, stop_ns, {"step": self._step, **args})
        self._spans.setdefault(replica, []).append(span)

    def _end(self) -> None:
        communicator = self._setup.communicator
        clocks = compare_clocks(communicator)
        ahead_ns = clocks[communicator.rank].ahead_ns
        of_rank = []
        for number, spans in self._spans.items():
            spans = [at._replace(start_ns=at.start_ns - ahead_ns, stop_ns=at.stop_ns - ahead_ns) for at in spans]
            of_rank.append(TraceProcess(number, self._title(number), spans))
        everybody = communicator.gather_object((of_rank, self._left_out))
        if everybody is None:
            return
        processes = sorted(chain.from_iterable(there for there, _ in everybody), key=attrgetter("number"))
        left_out = sum(count for _, count in everybody)
        accuracy_ns = max(clock.accuracy_ns for clock in clocks)
        remedy = "free disk space there, or choose another file: --trace FILE"
        with failing_with(MachineError, f"the trace cannot be written to {self._path}", remedy):
            write_whole(self._path, trace_json(processes, self._facts(accuracy_ns, left_out)))
        first, last = self.steps[0] + 1, self.steps[-1] + 1
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        count = sum(len(process.spans) for process in processes)
        clocks_text = f"clocks within {format_seconds(accuracy_ns / 1e9)}" if accuracy_ns else "one clock"
        full = f"; {left_out} more spans were dropped" if left_out else ""
        traced = f"{count} spans, {clocks_text}{full}; {self._path}"
        self._observer.noted(f"traced {which} of {self._plan.steps} (measured): {traced}")

    def _title(self, number: int) -> str:
        host, locations = self._setup.communicator.host_name, self._setup.placement.locations()
        mesh, several = self._setup.mesh, self._setup.program.ranks_of_replica > 1
        who = f"rank {number} ({mesh.place(number)})" if several else f"replica {number}"
        if self._setup.is_emulation:
            return f"{who} as {locations[number]}, emulated by one process on {host}, measured"
        if self._setup.works:
            return f"{who} as {locations[number]}, host {host}, measured"
        return f"parameter server, rank {number}, host {host}, measured"

    def _facts(self, accuracy_ns: int, left_out: int) -> Mapping[str, object]:
        document, mesh = self._setup.document, self._setup.mesh
        device = str(document.compile_options.get("arch", "device")).upper()
        return {
            "kind": "measured",
            "by": WRITER,
            "pef": document.program.name,
            "pef_digest": document.digest,
            "device": f"measured on CPUs, not on the {device} that the PEF was compiled for",
            "replicas": self._plan.world_size,
            **({"mesh": str(mesh)} if mesh.label(0) else {}),
            "emulated": self._setup.is_emulation,
            "sync": self._sync,
            "first_step": self.steps[0] + 1,
            "last_step": self.steps[-1] + 1,
            "steps_of_run": self._plan.steps,
            "clocks": "compared by messages" if accuracy_ns else "one clock for all ranks",
            "clock_accuracy_us": accuracy_ns / 1000,
            "spans_left_out": left_out,
        }


class Clock(NamedTuple):
    """How far a rank's clock is ahead of rank 0's, and the maximum error of that."""

    ahead_ns: int
    accuracy_ns: int


def compare_clocks(communicator: Communicator, now_ns: Callable[[], int] = perf_counter_ns) -> tuple[Clock, ...]:
    """Collective. The clocks of all ranks. Of several round trips with rank 0 the quickest counts, to within half of
    its time (Cristian, Distributed Computing 3, 1989). Ranks of one booted kernel read one clock."""
    boot = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    boots = communicator.all_gather_object(boot)
    communicator.barrier()
    clocks = [Clock(0, 0)]
    for other in range(1, communicator.world_size):
        if communicator.rank == 0:
            measured = _ask(communicator, other, now_ns)
            one_kernel = boots[0] is not None and boots[other] == boots[0]
            one_clock = one_kernel and abs(measured.ahead_ns) <= measured.accuracy_ns
            clocks.append(Clock(0, 0) if one_clock else measured)
        elif communicator.rank == other:
            _answer(communicator, now_ns)
    return communicator.broadcast_object(tuple(clocks))


def _ask(communicator: Communicator, other: int, now_ns: Callable[[], int]) -> Clock:
    measured: list[Clock] = []
    there = np.zeros(1, dtype=np.int64)
    for _ in range(_ROUND_TRIPS):
        answer = communicator.irecv(there.view(np.uint8), other, _TAG)
        sent_ns = now_ns()
        communicator.wait_all([communicator.isend(np.zeros(1, dtype=np.uint8), other, _TAG)])
        communicator.wait_all([answer])
        came_ns = now_ns()
        measured.append(Clock(int(there[0]) - (sent_ns + came_ns) // 2, (came_ns - sent_ns) // 2 + 1))
    return min(measured, key=attrgetter("accuracy_ns"))


def _answer(communicator: Communicator, now_ns: Callable[[], int]) -> None:
    question, now = np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    for _ in range(_ROUND_TRIPS):
        communicator.wait_all([communicator.irecv(question, 0, _TAG)])
        now[0] = now_ns()
        communicator.wait_all([communicator.isend(now.view(np.uint8), 0, _TAG)])
