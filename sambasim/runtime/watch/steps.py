"""What a rank does in a step, written to its line of the status file as it happens.

All text is put together once, and an event costs a copy of some bytes.
"""

from collections.abc import Sequence

from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Section
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.observer import SpanArgs, StepObserver
from sambasim.runtime.watch.board import State, Writer, prepare

_WAITING = prepare(State.WAITING, "waiting for peers")
_READING = prepare(State.RUNNING, "reading data")
_BATCH = prepare(State.RUNNING, "placing the batch")
_DONE = prepare(State.RUNNING, "reporting the step")


class StepStatus(StepObserver):
    """Writes by `writer` what happens in the steps of `program`."""

    def __init__(self, writer: Writer, program: Program) -> None:
        self._writer = writer
        self._texts = titles(program.training or program.evaluation)
        self._collectives: dict[str, bytes] = {}

    def step_begins(self, step: int) -> None:
        self._writer.step(step + 1)
        self._writer.does(_WAITING)

    def pass_begins(self, replica: int, micro_step: int) -> None:
        if micro_step:  # the first is told apart from a step that has but one by those after it
            self._writer.micro_step(micro_step + 1)
        self._writer.does(self._texts[0])

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        ended = sections[-1].index + 1
        if ended < len(self._texts):
            self._writer.does(self._texts[ended])

    def pass_ends(self, replica: int, loss: float) -> None:
        self._writer.does(_WAITING)

    def span_begins(self, replica: int, track: Track, name: str) -> None:
        if track is Track.COLLECTIVES:
            if name not in self._collectives:
                self._collectives[name] = prepare(State.WAITING, f"sync with peers: {name}")
            self._writer.does(self._collectives[name])
        elif name == "data":
            self._writer.does(_READING)

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        if track is Track.COLLECTIVES:
            self._writer.does(_WAITING)
        elif name == "data":
            self._writer.does(_BATCH)

    def step_ends(self, step: int, norm: float | None) -> None:
        self._writer.micro_step(0)
        self._writer.does(_DONE)


def titles(graph: Graph) -> Sequence[bytes]:
    """What to write once so many sections of a pass have been run, from none to all of them."""
    sections, _ = pass_and_update(graph)
    whole = len(graph.sections)
    texts = [f"section {number} of {whole} ({section.name})" for number, section in enumerate(sections, 1)]
    return [prepare(State.RUNNING, text) for text in [*texts, "backward done"]]
