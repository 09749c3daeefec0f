"""`session.profiler`: named events of an app and their times."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from sambasim.errors import OptionError, failing_with
from sambasim.samba.checks.job import Job
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error, app_line, current

__all__ = ["Event", "Profiler"]


@dataclass(frozen=True, slots=True)
class Event:
    """A timed event that has ended."""

    name: str
    elapsed_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """The handle of a started event."""

    name: str
    began_s: float
    events_before: int


class Profiler:
    """Times events of an app on this rank, in wall-clock time. Events of one name may overlap."""

    def __init__(self) -> None:
        self.events: list[Event] = []  # events in the order in which they ended
        self._running: list[Running] = []
        self._written: dict[Path, int] = {}  # up to which event each file has them
        self._kept = 0  # up to which event they are in some file

    @checks_keywords()
    def start_event(self, name: str) -> Running:
        """Returns a handle for `end_event`."""
        running = Running(name, time.perf_counter(), len(self.events))
        self._running.append(running)
        return running

    @checks_keywords()
    def end_event(self, event: Running | str, filename: str | Path | None = None) -> None:
        """Ends the event of this handle, or the last started one of this name. With `filename`, adds the events that
        the file does not have yet, a line of JSON each, `{"name": …, "elapsed_s": …}`; the first call of a process
        begins the file anew, with those that are in no file, or have ended while this one ran. Raises OptionError if
        there is no such event, or if the file cannot be written."""
        ended_s = time.perf_counter()
        running = next((one for one in reversed(self._running) if event in (one, one.name)), None)
        if running is None:
            name = event.name if isinstance(event, Running) else event
            raise app_error(OptionError, f"the event {name} was not started", f"profiler.start_event({name!r}) first")
        self._running.remove(running)
        self.events.append(Event(running.name, ended_s - running.began_s))
        if filename is not None:
            self._write(Path(filename).absolute(), min(self._kept, running.events_before))

    def _write(self, path: Path, first: int) -> None:
        """Takes as long as there are new events, however many there were before; a new file starts with the `first`."""
        known, watched, line = self._written.get(path), current().part(Job), app_line()
        if known is None and watched is not None and line is not None:
            watched.files.note(str(path), line)
        lines = (f"{json.dumps(asdict(event))}\n" for event in self.events[first if known is None else known :])
        what, remedy = f"the profile {path} cannot be written", "give the name of a file in a folder that exists"
        with failing_with(OptionError, what, remedy, line), path.open("w" if known is None else "a") as file:
            file.writelines(lines)
        self._written[path] = self._kept = len(self.events)

    @contextmanager
    def event(self, name: str) -> Iterator[None]:
        """`with profiler.event("step"):` around code, or `@profiler.event("step")` on a function."""
        running = self.start_event(name)
        try:
            yield
        finally:
            self.end_event(running)

    @checks_keywords()
    def print_statistics(
        self,
        keys: Iterable[str] | None = None,
        warmup_steps: int = 0,
        num_samples_per_iter: int | None = None,
        measurements: Iterable[str] | None = None,
    ) -> str:
        """A line for each event name of `keys`, or of all: how often, milliseconds, and samples per second, without the
        first `warmup_steps` events. measurements: "latency", "throughput"; None for both, if known"""
        known = ["latency", "throughput"] if num_samples_per_iter else ["latency"]
        wanted = known if measurements is None else [*measurements]
        if unknown := [word for word in wanted if word not in known]:
            what = f"the profiler has no measurement {unknown[0]}"
            if unknown == ["throughput"]:
                what = "throughput needs a number of samples"
            remedy = 'measurements=["latency"], or ["latency", "throughput"] with num_samples_per_iter='
            raise app_error(OptionError, what, remedy)
        lines = []
        for key in dict.fromkeys(event.name for event in self.events) if keys is None else keys:
            times_s = self._times_s(key, warmup_steps)
            line = f"{key}: {len(times_s)} times"
            if times_s and "latency" in wanted:
                mean, least, most = (1e3 * time_s for time_s in (fmean(times_s), min(times_s), max(times_s)))
                line += f", mean {mean:.3f} ms, {least:.3f} to {most:.3f} ms"
            if times_s and "throughput" in wanted and num_samples_per_iter:
                line += f", {num_samples_per_iter / fmean(times_s):.1f} samples/s"
            lines.append(line)
        return "\n".join(lines)

    @checks_keywords()
    def get_throughputs(
        self, keys: Iterable[str], num_samples_per_iter: int, warmup_steps: int = 0
    ) -> dict[str, float]:
        """Samples per second by event name, for `num_samples_per_iter` an event, without the first `warmup_steps`
        events; 0 without events."""
        times_s = {key: self._times_s(key, warmup_steps) for key in keys}
        return {key: num_samples_per_iter / fmean(of_key) if of_key else 0.0 for key, of_key in times_s.items()}

    def _times_s(self, name: str, warmup_steps: int) -> list[float]:
        return [event.elapsed_s for event in self.events if event.name == name][warmup_steps:]
