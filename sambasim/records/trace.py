"""Traces as JSON files for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process is a replica, or a rank without one; a thread is a track of it; spans (X) of a thread are nested or disjoint.
`runtime` writes measured spans and `report` predicted ones, never both in one file. Format: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

_NS_PER_US = 1000


class Track(StrEnum):
    """The tracks of a replica, in the order in which a viewer shows them."""

    HOST = "host"
    SECTIONS = "sections"
    COPIES = "copies"
    COLLECTIVES = "collectives"


_THREADS: Mapping[Track, int] = {track: number for number, track in enumerate(Track, start=1)}


class TraceSpan(NamedTuple):
    """A span, in nanoseconds of one clock. A viewer shows `args` beside its name."""

    track: Track
    name: str
    start_ns: int
    stop_ns: int
    args: Mapping[str, int | float | str] = {}


@dataclass(frozen=True, slots=True)
class TraceProcess:
    """The spans of one process. The name says whether they are measured or predicted."""

    number: int
    name: str
    spans: Sequence[TraceSpan]


def trace_json(processes: Sequence[TraceProcess], facts: Mapping[str, object]) -> str:
    """One JSON object, one event a line. The earliest span begins at 0. `facts` are written as `otherData`."""
    zero_ns = min((span.start_ns for process in processes for span in process.spans), default=0)
    names = [event for process in processes for event in _names(process)]
    # Of two spans that begin together the longer one comes first: the other may be nested in it.
    spans = sorted(
        ((span, process.number) for process in processes for span in process.spans),
        key=lambda pair: (pair[0].start_ns, -pair[0].stop_ns, pair[1], _THREADS[pair[0].track], pair[0].name),
    )
    events = [*names, *(_event(span, number, zero_ns) for span, number in spans)]
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(facts)},\n"traceEvents": [\n{lines}\n]}}\n'


def _names(process: TraceProcess) -> Iterator[Mapping[str, object]]:
    of_process = {"ph": "M", "pid": process.number, "tid": 0}
    yield {**of_process, "name": "process_name", "args": {"name": process.name}}
    yield {**of_process, "name": "process_sort_index", "args": {"sort_index": process.number}}
    used = {span.track for span in process.spans}
    for track, thread in _THREADS.items():
        if track in used:
            of_thread = {"ph": "M", "pid": process.number, "tid": thread}
            yield {**of_thread, "name": "thread_name", "args": {"name": track}}
            yield {**of_thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _event(span: TraceSpan, process: int, zero_ns: int) -> Mapping[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "pid": process,
        "tid": _THREADS[span.track],
        "ts": (span.start_ns - zero_ns) / _NS_PER_US,
        "dur": (span.stop_ns - span.start_ns) / _NS_PER_US,
        "args": span.args,
    }
