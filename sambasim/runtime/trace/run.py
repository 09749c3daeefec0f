"""`run --trace`: a few steps of every rank, in one file.

The first steps are left out, if there are enough of them: in those, kernels find their places and memory its pages.
After the last traced step the ranks compare their clocks, and rank 0 writes what all of them have seen. Evaluations are
between steps, and not traced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

from sambasim import __version__
from sambasim.errors import MachineError
from sambasim.hardware.placement import Placement, Seat
from sambasim.ir.program import Program
from sambasim.options.run import RunOptions
from sambasim.pef import PefDocument
from sambasim.records.trace import TraceProcess, TraceSpan, Track, trace_json
from sambasim.runtime.line_file import write_whole
from sambasim.runtime.listener import Listener, Step
from sambasim.runtime.plan import Plan
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.replica import Replica
from sambasim.runtime.sync.interface import GradientSync
from sambasim.runtime.trace import stopwatches
from sambasim.runtime.trace.clocks import Clock, compare_clocks
from sambasim.runtime.trace.recorder import Recorder
from sambasim.runtime.trace.watched import StandIns
from sambasim.runtime.training import Trainer
from sambasim.units import format_seconds

DEFAULT_STEPS = 3
WARM_UP_STEPS = 2

Spans = Mapping[int, Sequence[TraceSpan]]


def traced_steps(asked: int | None, steps: int, start: int = 0) -> range:
    """Which steps of a run are traced that takes those from `start`, which counts from 0, up to `steps`: some after the
    first ones, as far as there are any."""
    count = min(asked or DEFAULT_STEPS, steps - start)
    first = start + min(WARM_UP_STEPS, steps - start - count)
    return range(first, first + count)


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace in the file `path` is of: `steps` of the run of a PEF, compiled for `device`, that syncs by the way
    called `sync`. `seats` are those of its replicas on the simulated machine."""

    path: Path
    pef: str
    digest: str
    device: str
    sync: str
    replicas: int
    emulated: bool
    steps: range
    of_steps: int
    seats: Sequence[Seat]


def traced_run(
    options: RunOptions, document: PefDocument, plan: Plan, sync: str, placement: Placement, *, emulated: bool
) -> Traced | None:
    """What `options` ask to be traced of a run with `plan`, whose replicas sit as in `placement`; None for nothing."""
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
        seats=placement.seats(),
    )


class RunTrace:
    """Traces the steps that `traced` names, and writes its file after the last of them. Collective."""

    def __init__(
        self,
        traced: Traced,
        program: Program,
        replicas: Sequence[Replica],
        sync: GradientSync,
        communicator: Communicator,
        listener: Listener,
    ) -> None:
        self._traced = traced
        self._graph = program.training or program.evaluation
        self._replicas = replicas
        self._sync = sync
        self._communicator = communicator
        self._listener = listener
        self._recorder = Recorder()
        self._stand_ins = StandIns()

    def step(self, trainer: Trainer, epoch: int) -> Step:
        """A step of `trainer`, traced or not."""
        number, steps = trainer.totals.steps, self._traced.steps
        if number not in steps:
            return trainer.step(epoch)
        recorder, rank = self._recorder, self._communicator.rank
        if number == steps[0]:
            stopwatches.start(self._stand_ins, recorder, self._graph, self._replicas, self._sync, rank)
        recorder.step = number + 1
        began_ns = perf_counter_ns()
        step = trainer.step(epoch)
        stopped_ns = perf_counter_ns()
        recorder.room = max(recorder.room, 1)  # there is always room for the whole step
        recorder.add(rank, Track.HOST, f"step {number + 1}", began_ns, stopped_ns, {"epoch": epoch + 1})
        if number == steps[-1]:
            self._stand_ins.remove()
            self._end()
        return step

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
        self._listener.noted(self._told(processes, accuracy_ns, left_out))

    def _title(self, number: int) -> str:
        traced, host = self._traced, self._communicator.host_name
        if traced.emulated:
            plays = f"emulated by one process on {host}"
            return f"replica {number} as {traced.seats[number]}, {plays}, measured"
        if any(replica.rank == number for replica in self._replicas):
            return f"replica {number} as {traced.seats[number]}, host {host}, measured"
        return f"parameter server, rank {number}, host {host}, measured"

    def _facts(self, accuracy_ns: int, left_out: int) -> Mapping[str, object]:
        traced = self._traced
        return {
            "kind": "measured",
            "by": f"sambasim {__version__}",
            "pef": traced.pef,
            "pef_digest": traced.digest,
            "device": f"measured on CPUs, which play the {traced.device} that the PEF was compiled for",
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
            raise MachineError(what, remedy="make room there, or another place: --trace FILE") from error

    def _told(self, processes: Sequence[TraceProcess], accuracy_ns: int, left_out: int) -> str:
        steps = self._traced.steps
        which = f"step {steps[0] + 1}" if len(steps) == 1 else f"steps {steps[0] + 1} to {steps[-1] + 1}"
        spans = sum(len(one.spans) for one in processes)
        clocks = f"clocks within {format_seconds(accuracy_ns / 1e9)}" if accuracy_ns else "one clock"
        full = f"; {left_out} more had no room, and are left out" if left_out else ""
        return (
            f"traced {which} of {self._traced.of_steps} (measured): {spans} spans, {clocks}{full}; {self._traced.path}"
        )


def _on_time(span: TraceSpan, clock: Clock) -> TraceSpan:
    """`span` by the clock of rank 0."""
    return span._replace(start_ns=span.start_ns - clock.ahead_ns, stop_ns=span.stop_ns - clock.ahead_ns)
