"""Events of an app, with the time that each took: `session.profiler`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sambasim.errors import OptionError


@dataclass(frozen=True, slots=True)
class Event:
    """Something that an app timed."""

    name: str
    elapsed_s: float


class Profiler:
    """Times what an app brackets, by the wall's clock, on this rank. Events of one name may follow each other."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """Those that have ended, in that order."""
        self._began_s: dict[str, float] = {}

    def start_event(self, name: str) -> None:
        """`name` begins."""
        self._began_s[name] = time.perf_counter()

    def end_event(self, name: str) -> None:
        """`name` ends. Raises OptionError if it has not begun."""
        began_s = self._began_s.pop(name, None)
        if began_s is None:
            raise OptionError(
                f"the event {name} ends, and has not begun", remedy=f"profiler.start_event({name!r}) first"
            )
        self.events.append(Event(name, time.perf_counter() - began_s))

    @contextmanager
    def event(self, name: str) -> Iterator[None]:
        """Around what is to be timed."""
        self.start_event(name)
        try:
            yield
        finally:
            self.end_event(name)
