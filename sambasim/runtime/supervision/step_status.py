"""Writes what a rank is doing within a step to its line of the status file."""

from collections.abc import Sequence

from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Section
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.observer import SpanArgs, StepObserver
from sambasim.runtime.supervision.status_file import Activity, State, prepare

_WAITING = prepare(State.WAITING, "waiting for peers")
_READING = prepare(State.RUNNING, "reading data")
_REPORTING = prepare(State.RUNNING, "reporting the step")


class StepStatus(StepObserver):
    """Writes to `activity` what happens in the steps of `program`. Each event copies a few prepared bytes."""

    detailed = False

    def __init__(self, activity: Activity, program: Program) -> None:
        self._activity = activity
        self._set = activity.set
        self._texts = _section_texts(program.training or program.evaluation)
        self._collectives: dict[str, bytes] = {}
        self._names_micro_step = False
        self._now = _WAITING  # what this rank does while it does not communicate

    def step_begins(self, step: int) -> None:
        self._activity.step(step + 1)
        self._now = _WAITING
        self._set(_WAITING)

    def batch_begins(self, replica: int, micro_step: int) -> None:
        self._now = _READING
        self._set(_READING)

    def pass_begins(self, replica: int, micro_step: int) -> None:
        if micro_step:  # most steps have only one, so the first is not numbered
            self._activity.micro_step(micro_step + 1)
            self._names_micro_step = True
        self._now = self._texts[0]
        self._set(self._now)

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        ended = sections[-1].index + 1
        if ended < len(self._texts):
            self._now = self._texts[ended]
            self._set(self._now)

    def pass_ends(self, replica: int, loss: float) -> None:
        self._now = _WAITING
        self._set(_WAITING)

    def span_begins(self, replica: int, track: Track, name: str) -> None:
        if track is Track.COLLECTIVES:
            if name not in self._collectives:
                self._collectives[name] = prepare(State.WAITING, f"sync with peers: {name}")
            self._set(self._collectives[name])

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        if track is Track.COLLECTIVES:
            self._set(self._now)

    def step_ends(self, step: int, norm: float | None) -> None:
        if self._names_micro_step:
            self._activity.micro_step(0)
            self._names_micro_step = False
        self._set(_REPORTING)


def _section_texts(graph: Graph) -> Sequence[bytes]:
    """What to write once so many sections of a pass have been run."""
    sections, _ = pass_and_update(graph)
    whole = len(graph.sections)
    texts = [f"section {number} of {whole} ({section.name})" for number, section in enumerate(sections, 1)]
    return [prepare(State.RUNNING, text) for text in texts]
