"""`run --trace`: a trace of a few steps of every rank, in one file.

The first two steps are skipped if there are enough steps, because they include one-time work. After the last traced
step the ranks compare their clocks, and rank 0 writes the spans of all. Evaluations lie between steps and are not
traced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns

from sambasim import __version__
from sambasim.errors import MachineError
from sambasim.hardware.placement import Location, Placement
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.program import Program
from sambasim.options.run import RunOptions
from sambasim.pef import PefDocument
from sambasim.records.trace import TraceProcess, TraceSpan, Track, trace_json
from sambasim.runtime.clocks import Clock, compare_clocks
from sambasim.runtime.listener import Listener
from sambasim.runtime.observer import SpanArgs, StepRecorder
from sambasim.runtime.output import write_whole
from sambasim.runtime.plan import Plan
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.replica import Replica
from sambasim.units import format_seconds

MOST_SPANS = 100_000
"""Maximum per process: some tens of megabytes of JSON. Later spans are only counted."""


@dataclass(slots=True)
class Recorder:
    """Stores spans by replica, at most `capacity` more of them. The args of every span contain its step."""

    capacity: int = MOST_SPANS
    step: int = 0
    left_out: int = 0
    spans: dict[int, list[TraceSpan]] = field(default_factory=dict)

    def add(
        self,
        replica: int,
        track: Track,
        name: str,
        start_ns: int,
        stop_ns: int | None = None,
        args: Mapping[str, int | float | str] | None = None,
    ) -> None:
        """Add a span; without `stop_ns` it ends now."""
        stop_ns = perf_counter_ns() if stop_ns is None else stop_ns
        if self.capacity <= 0:
            self.left_out += 1
            return
        self.capacity -= 1
        span = TraceSpan(track, name, start_ns, stop_ns, {"step": self.step, **(args or {})})
        self.spans.setdefault(replica, []).append(span)


DEFAULT_STEPS = 3
WARM_UP_STEPS = 2

_EXCHANGED = {SectionKind.REDUCE, SectionKind.GATHER}


def traced_steps(asked: int | None, steps: int, start: int = 0) -> range:
    """The traced steps of a run from `start` (from 0) to `steps`: after the warm-up steps if there are enough."""
    count = min(asked or DEFAULT_STEPS, steps - start)
    first = start + min(WARM_UP_STEPS, steps - start - count)
    return range(first, first + count)


@dataclass(frozen=True, slots=True)
class Traced:
    """What to trace, and the facts of the run for the file `path`.

    steps, of_steps: the traced steps, and the number of steps of the run
    device: the device that the PEF was compiled for
    sync: the name of the sync path
    locations: of the replicas on the simulated machine
    """

    path: Path
    pef: str
    digest: str
    device: str
    sync: str
    replicas: int
    emulated: bool
    steps: range
    of_steps: int
    locations: Sequence[Location]


def traced_run(
    options: RunOptions, document: PefDocument, plan: Plan, sync: str, placement: Placement, *, emulated: bool
) -> Traced | None:
    """What `options` ask to trace; None without `--trace`."""
    if options.trace is None:
        return None
    return Traced(
        path=options.trace,
        pef=document.program.name,
        digest=document.digest,
        device=str(document.compile_options.get("arch", "device")).upper(),
        sync=sync,
        replicas=plan.world_size,
        emulated=emulated,
        steps=traced_steps(options.trace_steps, plan.steps, plan.start.step),
        of_steps=plan.steps,
        locations=placement.locations(),
    )


class RunTrace(StepRecorder):
    """Traces the steps `traced.steps` and writes the file after the last one. Collective."""

    def __init__(
        self,
        traced: Traced,
        program: Program,
        replicas: Sequence[Replica],
        communicator: Communicator,
        listener: Listener,
    ) -> None:
        self.steps = traced.steps
        self._traced = traced
        self._in_pass = len(pass_and_update(program.training)[0]) if program.training else 0
        self._replicas = {replica.rank for replica in replicas if replica.works}
        self._communicator = communicator
        self._listener = listener
        self._recorder = Recorder()
        self._began_ns = 0
        self._micro_step: dict[int, int] = {}

    def begin(self, step: int) -> None:
        self._recorder.step = step + 1
        self._began_ns = perf_counter_ns()

    def end(self, step: int, epoch: int, loss: float) -> None:
        self._recorder.capacity = max(self._recorder.capacity, 1)  # the span of the step is never dropped
        rank = self._communicator.rank
        self._recorder.add(rank, Track.HOST, f"step {step + 1}", self._began_ns, None, {"epoch": epoch + 1})
        if step == self.steps[-1]:
            self._end()

    def pass_begins(self, replica: int, micro_step: int) -> None:
        self._micro_step[replica] = micro_step

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        kinds = {section.kind for section in sections}
        track = Track.COLLECTIVES if kinds <= _EXCHANGED else Track.SECTIONS
        args: dict[str, int | float | str] = {"section": _numbers(sections)}
        if sections[0].index < self._in_pass:
            args["micro_step"] = self._micro_step.get(replica, 0)
        self._recorder.add(replica, track, _title(sections), began_ns, None, args)

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        self._recorder.add(replica, track, name, began_ns, None, args)

    def _end(self) -> None:
        clocks = compare_clocks(self._communicator)
        clock = clocks[self._communicator.rank]
        own = [
            TraceProcess(number, self._title(number), [_on_time(span, clock) for span in spans])
            for number, spans in self._recorder.spans.items()
        ]
        everybody = self._communicator.gather_object((own, self._recorder.left_out))
        if everybody is None:
            return
        processes = sorted((one for of_rank, _ in everybody for one in of_rank), key=lambda one: one.number)
        left_out = sum(count for _, count in everybody)
        accuracy_ns = max(one.accuracy_ns for one in clocks)
        self._write(trace_json(processes, self._facts(accuracy_ns, left_out)))
        self._listener.noted(self._summary(processes, accuracy_ns, left_out))

    def _title(self, number: int) -> str:
        traced, host = self._traced, self._communicator.host_name
        if traced.emulated:
            emulated = f"emulated by one process on {host}"
            return f"replica {number} as {traced.locations[number]}, {emulated}, measured"
        if number in self._replicas:
            return f"replica {number} as {traced.locations[number]}, host {host}, measured"
        return f"parameter server, rank {number}, host {host}, measured"

    def _facts(self, accuracy_ns: int, left_out: int) -> Mapping[str, object]:
        traced = self._traced
        return {
            "kind": "measured",
            "by": f"sambasim {__version__}",
            "pef": traced.pef,
            "pef_digest": traced.digest,
            "device": f"measured on CPUs, not on the {traced.device} that the PEF was compiled for",
            "replicas": traced.replicas,
            "emulated": traced.emulated,
            "sync": traced.sync,
            "first_step": traced.steps[0] + 1,
            "last_step": traced.steps[-1] + 1,
            "steps_of_run": traced.of_steps,
            "clocks": "compared by messages" if accuracy_ns else "one clock for all ranks",
            "clock_accuracy_us": accuracy_ns / 1000,
            "spans_left_out": left_out,
        }

    def _write(self, text: str) -> None:
        path = self._traced.path
        try:
            write_whole(path, text)
        except OSError as error:
            what = f"the trace cannot be written to {path}: {error.strerror}"
            raise MachineError(what, remedy="free disk space there, or choose another file: --trace FILE") from error

    def _summary(self, processes: Sequence[TraceProcess], accuracy_ns: int, left_out: int) -> str:
        steps = self._traced.steps
        which = f"step {steps[0] + 1}" if len(steps) == 1 else f"steps {steps[0] + 1} to {steps[-1] + 1}"
        spans = sum(len(one.spans) for one in processes)
        clocks = f"clocks within {format_seconds(accuracy_ns / 1e9)}" if accuracy_ns else "one clock"
        full = f"; {left_out} more spans were dropped" if left_out else ""
        return (
            f"traced {which} of {self._traced.of_steps} (measured): {spans} spans, {clocks}{full}; {self._traced.path}"
        )


def _numbers(sections: Sequence[Section]) -> int | str:
    """The number of one section, or those of several, as text."""
    return sections[0].index if len(sections) == 1 else ", ".join(str(section.index) for section in sections)


def _title(sections: Sequence[Section]) -> str:
    kinds = "+".join(dict.fromkeys(section.kind.value for section in sections))
    first, last = sections[0], sections[-1]
    return f"{kinds} {first.name}" if first is last else f"{kinds} {first.name} … {last.name}"


def _on_time(span: TraceSpan, clock: Clock) -> TraceSpan:
    """`span` in the time of rank 0's clock."""
    return span._replace(start_ns=span.start_ns - clock.ahead_ns, stop_ns=span.stop_ns - clock.ahead_ns)
