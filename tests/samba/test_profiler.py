"""What an app times, and the statistics of it."""

import json
import time
from itertools import count
from pathlib import Path

import pytest

from sambasim import samba
from sambasim.errors import OptionError
from sambasim.samba.profiler import Event, Profiler


@pytest.fixture
def timed() -> Profiler:
    profiler = Profiler()
    profiler.events += [Event("step", seconds) for seconds in (9.0, 0.25, 0.5)] + [Event("data", 0.125)]
    return profiler


def test_an_event_ends_by_its_handle_or_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", count().__next__)
    profiler = Profiler()
    outer, inner = profiler.start_event("step"), profiler.start_event("step")
    profiler.start_event("data")
    profiler.end_event(outer)
    profiler.end_event("data")
    profiler.end_event(inner)
    assert profiler.events == [Event("step", 3), Event("data", 2), Event("step", 4)]
    for ended in (outer, "step"):
        with pytest.raises(OptionError, match="the event step was not started") as caught:
            profiler.end_event(ended)
        assert str(caught.value.where).startswith(f"{__file__}:")


def test_an_event_is_a_block_and_a_decorator() -> None:
    class App:
        @samba.session.profiler.event("decorated")
        def step(self, value: int) -> int:
            return value + 1

    before = len(samba.session.profiler.events)
    assert (App().step(1), App().step(2)) == (2, 3)
    with pytest.raises(ZeroDivisionError), samba.session.profiler.event("block"):
        _ = 1 / 0
    assert [event.name for event in samba.session.profiler.events[before:]] == ["decorated", "decorated", "block"]


def test_statistics_leave_the_warmup_out(timed: Profiler) -> None:
    assert timed.print_statistics(["step"], 1, num_samples_per_iter=3) == (
        "step: 2 times, mean 375.000 ms, 250.000 to 500.000 ms, 8.0 samples/s"
    )
    assert timed.print_statistics(["data"], measurements=["latency"]) == (
        "data: 1 times, mean 125.000 ms, 125.000 to 125.000 ms"
    )
    assert timed.print_statistics().count("\n") == 1
    assert timed.print_statistics(["nothing"]) == "nothing: 0 times"
    assert timed.get_throughputs(["data", "nothing"], 4) == {"data": 32.0, "nothing": 0.0}


def test_a_measurement_that_is_not_there_is_refused(timed: Profiler) -> None:
    cases = {"power": "the profiler has no measurement power", "throughput": "throughput needs a number of samples"}
    for measurement, what in cases.items():
        with pytest.raises(OptionError, match=what):
            timed.print_statistics(["step"], measurements=[measurement])


def test_it_writes_its_events(timed: Profiler, tmp_path: Path) -> None:
    timed.start_event("data")
    timed.end_event("data", tmp_path / "profile.json")
    events = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    assert events[3] == {"name": "data", "elapsed_s": 0.125}
    assert len(events) == 5
