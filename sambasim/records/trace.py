"""Traces as JSON files for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process is a replica, or a rank without one; a thread is a track of it; spans (X) of a thread are nested or disjoint.
`runtime` writes measured spans and `report` predicted ones, never both in one file. Format: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Track(StrEnum):
    """The tracks of a replica, in the order in which a viewer shows them."""

    HOST = "host"
    SECTIONS = "sections"
    COPIES = "copies"
    COLLECTIVES = "collectives"


_THREADS = {track: number for number, track in enumerate(Track, start=1)}


class TraceSpan(NamedTuple):
    """A span, in nanoseconds of one clock. A viewer shows `args` beside its name."""

    track: Track
    name: str
    start_ns: int
    stop_ns: int
    args: Mapping[str, int | float | str] = {}


class TraceProcess(NamedTuple):
    """The spans of one process. The name says whether they are measured or predicted."""

    number: int
    name: str
    spans: Sequence[TraceSpan]


def trace_json(processes: Sequence[TraceProcess], facts: Mapping[str, object]) -> str:
    """One JSON object, one event a line. The earliest span begins at 0. `facts` are written as `otherData`."""
    names = [event for process in processes for event in _names(process)]
    # Of two spans that begin together the longer one comes first: the other may be nested in it.
    spans = sorted(
        ((span, process.number) for process in processes for span in process.spans),
        key=lambda pair: (pair[0].start_ns, -pair[0].stop_ns, pair[1], _THREADS[pair[0].track], pair[0].name),
    )
    zero_ns = spans[0][0].start_ns if spans else 0
    events = [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.track,
            "pid": number,
            "tid": _THREADS[span.track],
            "ts": (span.start_ns - zero_ns) / 1000,
            "dur": (span.stop_ns - span.start_ns) / 1000,
            "args": span.args,
        }
        for span, number in spans
    ]
    lines = ",\n".join(json.dumps(event) for event in [*names, *events])
    return f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(facts)},\n"traceEvents": [\n{lines}\n]}}\n'


def _names(process: TraceProcess) -> Iterator[Mapping[str, object]]:
    used = {span.track for span in process.spans}
    threads = [("thread", thread, track, thread) for track, thread in _THREADS.items() if track in used]
    for kind, thread, name, place in [("process", 0, process.name, process.number), *threads]:
        event = {"ph": "M", "pid": process.number, "tid": thread}
        yield {**event, "name": f"{kind}_name", "args": {"name": name}}
        yield {**event, "name": f"{kind}_sort_index", "args": {"sort_index": place}}
