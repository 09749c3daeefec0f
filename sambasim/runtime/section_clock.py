"""How long each section of a step takes on this machine.

Sections that were compiled or fused together, such as REDUCE, OPT and GATHER where they are one pass over memory, get
one time together.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.ir.graph import Section
from sambasim.runtime.observer import StepObserver


@dataclass(frozen=True, slots=True)
class SectionTime:
    """The time of `sections`, usually one."""

    sections: tuple[Section, ...]
    elapsed_s: float


class SectionClock(StepObserver):
    """Times the sections of each pass. Call `begin`, then `sections_end` for each, then `end`."""

    detailed = False

    def __init__(self) -> None:
        self.passes: list[list[SectionTime]] = []
        """The times of each finished pass, in the order of its sections."""
        self._sections: Sequence[Section] = ()
        self._times: list[SectionTime] = []
        self._ended = 0
        self._last_ns = 0

    def begin(self, sections: Sequence[Section]) -> None:
        """A pass through `sections` begins."""
        self._sections, self._times, self._ended = sections, [], 0
        self._last_ns = time.perf_counter_ns()

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        self._last_ns = time.perf_counter_ns()
        self._times.append(SectionTime(tuple(sections), (self._last_ns - began_ns) / 1e9))
        self._ended += len(sections)

    def end(self) -> None:
        """The pass has ended. Sections that were not reported share the time since the last one."""
        if self._ended < len(self._sections):
            now_ns = time.perf_counter_ns()
            self._times.append(SectionTime(tuple(self._sections[self._ended :]), (now_ns - self._last_ns) / 1e9))
        self.passes.append(self._times)
        self._times = []
