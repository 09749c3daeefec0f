"""The spans of one process, as they come."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns

from sambasim.records.trace import TraceSpan, Track

MOST_SPANS = 100_000
"""Of one process: some tens of megabytes of JSON. Those after it are counted, and not kept."""


@dataclass(slots=True)
class Recorder:
    """Keeps spans by replica; there is room for `room` of them. Every span has the number of its step in its `args`."""

    room: int = MOST_SPANS
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
        """One more; it ends now unless `stop_ns` says otherwise."""
        stop_ns = perf_counter_ns() if stop_ns is None else stop_ns
        if self.room <= 0:
            self.left_out += 1
            return
        self.room -= 1
        span = TraceSpan(track, name, start_ns, stop_ns, {"step": self.step, **(args or {})})
        self.spans.setdefault(replica, []).append(span)
