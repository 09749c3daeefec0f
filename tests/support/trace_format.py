"""What the Trace Event Format asks of a file, and what is promised of ours beyond it. Reads the text of a trace."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

_METADATA = {f"{of}_{what}": what for of in ("process", "thread") for what in ("name", "sort_index")}


class Seen(NamedTuple):
    name: str
    process: int
    track: str
    start_ns: int
    stop_ns: int
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    facts: Mapping[str, Any]
    processes: Mapping[int, str]
    spans: Sequence[Seen]

    def named(self, text: str, process: int | None = None) -> list[Seen]:
        """The spans whose names begin with `text`, of one process or of all."""
        return [one for one in self.spans if one.name.startswith(text) and process in (None, one.process)]


def read_trace(text: str) -> Trace:
    """Raises AssertionError at the first thing that is not as it should be."""
    file = json.loads(text, parse_constant=_no_constant)
    assert set(file) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert file["displayTimeUnit"] in ("ms", "ns")
    facts, events = file["otherData"], file["traceEvents"]
    assert facts["kind"] in ("measured", "predicted")
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    spans: list[Seen] = []
    for event in events:
        assert (type(event["pid"]), type(event["tid"]), type(event["name"])) == (int, int, str), event
        if event["ph"] == "M":
            assert not spans, "names come first"
            (value,) = (event["args"][_METADATA[event["name"]]],)
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = value
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in tracks
                tracks[event["pid"], event["tid"]] = value
            continue
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}, event
        assert event["ph"] == "X"
        assert event["name"]
        assert event["cat"] == tracks[event["pid"], event["tid"]]
        assert all(isinstance(value, int | float | str) for value in event["args"].values()), event
        spans.append(_seen(event))
    assert all(name.endswith(f", {facts['kind']}") for name in processes.values()), processes
    assert {one.process for one in spans} == set(processes)
    _check_order(spans)
    return Trace(facts, processes, spans)


def _seen(event: Mapping[str, Any]) -> Seen:
    start_ns, dur_ns = (round(event[field] * 1000) for field in ("ts", "dur"))
    assert (start_ns / 1000, dur_ns / 1000) == (event["ts"], event["dur"]), "not in whole nanoseconds"
    assert start_ns >= 0
    assert dur_ns >= 0
    return Seen(event["name"], event["pid"], event["cat"], start_ns, start_ns + dur_ns, event["args"])


def _check_order(spans: Sequence[Seen]) -> None:
    """By when they begin; on one track, either apart or one within the other, the outer one first."""
    if spans:
        assert spans[0].start_ns == 0
    assert all(before.start_ns <= after.start_ns for before, after in pairwise(spans))
    open_spans: dict[tuple[int, str], list[Seen]] = {}
    for span in spans:
        outer = open_spans.setdefault((span.process, span.track), [])
        while outer and outer[-1].stop_ns <= span.start_ns:
            outer.pop()
        assert not outer or span.stop_ns <= outer[-1].stop_ns, f"{span} is neither in {outer[-1]} nor behind it"
        outer.append(span)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
