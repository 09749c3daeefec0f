"""The file that a trace is, and the reader of the tests, which must see what is wrong."""

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from sambasim.records.trace import TraceProcess, TraceSpan, Track, trace_json
from tests.support.trace_format import read_trace

MEASURED = {"kind": "measured"}


@st.composite
def _nested(draw: st.DrawFn, start_ns: int, stop_ns: int, depth: int) -> list[TraceSpan]:
    """Spans of one track between two moments, as calls of functions make them."""
    track = Track.HOST
    spans = [TraceSpan(track, f"depth {depth}", start_ns, stop_ns, {"step": depth})]
    if depth:
        cuts = sorted(draw(st.lists(st.integers(start_ns, stop_ns), max_size=6)))
        for begin, end in zip(cuts[::2], cuts[1::2], strict=False):
            spans += draw(_nested(begin, end, depth - 1))
    return spans


@given(st.data(), st.integers(0, 10**15), st.integers(0, 10**12), st.randoms())
def test_what_is_nested_is_read_as_nested_in_whatever_order_it_came(
    data: st.DataObject, start_ns: int, size_ns: int, rng: random.Random
) -> None:
    spans = data.draw(_nested(start_ns, start_ns + size_ns, 3))
    shuffled = rng.sample(spans, len(spans))
    text = trace_json([TraceProcess(3, "replica 3, measured", shuffled)], MEASURED)
    trace = read_trace(text)
    assert sorted((one.start_ns + start_ns, one.stop_ns + start_ns) for one in trace.spans) == sorted(
        (span.start_ns, span.stop_ns) for span in spans
    )
    assert trace.processes == {3: "replica 3, measured"}


def test_every_track_that_is_used_has_a_thread_of_its_own() -> None:
    spans = [TraceSpan(track, "busy", 5, 9) for track in (Track.COLLECTIVES, Track.HOST)]
    processes = [TraceProcess(rank, f"replica {rank}, measured", spans) for rank in range(2)]
    events = json.loads(trace_json(processes, MEASURED))["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {(0, 1): "host", (0, 4): "collectives", (1, 1): "host", (1, 4): "collectives"}
    assert [event["tid"] for event in events if event["ph"] == "X"] == [1, 4, 1, 4]
