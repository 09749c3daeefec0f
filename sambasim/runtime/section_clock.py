"""Measured times of the sections of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from sambasim.ir.graph import Section
from sambasim.runtime.observer import StepObserver


@dataclass(frozen=True, slots=True)
class SectionTime:
    sections: tuple[Section, ...]
    elapsed_s: float


class SectionClock(StepObserver):
    """Times the sections of each pass. Call `begin`, then `sections_end` for each, then `end`. Of several ranks that
    take turns, the time since the last call belongs to the sections that end."""

    def __init__(self) -> None:
        self.passes: list[list[SectionTime]] = []
        self._sections: Sequence[Section] = ()
        self._times: list[SectionTime] = []
        self._ended = 0
        self._ranks = 1
        self._last_ns = 0

    def begin(self, sections: Sequence[Section], ranks: int = 1) -> None:
        self._sections, self._times, self._ended, self._ranks = sections, [], 0, ranks
        self._last_ns = perf_counter_ns()

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        before_ns, self._last_ns = self._last_ns, perf_counter_ns()
        if self._ranks > 1:
            began_ns = before_ns
            for number, one in enumerate(self._times):
                if one.sections[0] == sections[0]:  # of another rank
                    elapsed_s = one.elapsed_s + (self._last_ns - began_ns) / 1e9
                    self._times[number] = SectionTime(one.sections, elapsed_s)
                    return
        self._times.append(SectionTime(tuple(sections), (self._last_ns - began_ns) / 1e9))
        self._ended += len(sections)

    def end(self) -> None:
        """The pass has ended. Sections that were not reported share the time since the last one."""
        if self._ended < len(self._sections):
            now_ns = perf_counter_ns()
            self._times.append(SectionTime(tuple(self._sections[self._ended :]), (now_ns - self._last_ns) / 1e9))
        self.passes.append(self._times)
        self._times = []
