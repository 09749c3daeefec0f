"""How long each section of a step takes on this machine.

Whoever runs sections tells the clock as each is over. What is not told apart, such as REDUCE, OPT and GATHER where they
are one pass over memory, gets one time together.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.ir.graph import Section, SectionKind


@dataclass(frozen=True, slots=True)
class SectionTime:
    """What `sections` took together, mostly one."""

    sections: tuple[Section, ...]
    elapsed_s: float


class SectionClock:
    """Times the same sections in one pass after another: `begin`, then what tells of sections, then `end`."""

    def __init__(self) -> None:
        self.passes: list[list[SectionTime]] = []
        """The times of each pass that has ended, in the order in which its sections ran."""
        self._sections: Sequence[Section] = ()
        self._times: list[SectionTime] = []
        self._over = 0
        self._began_s = 0.0

    def begin(self, sections: Sequence[Section]) -> None:
        """A pass through `sections` begins."""
        self._sections, self._times, self._over = sections, [], 0
        self.go_on()

    def go_on(self) -> None:
        """What was done since the last section is no part of the next one."""
        self._began_s = time.perf_counter()

    def count_over(self, count: int) -> None:
        """The first `count` sections of the pass are over."""
        now_s = time.perf_counter()
        self._times.append(SectionTime(tuple(self._sections[self._over : count]), now_s - self._began_s))
        self._over, self._began_s = count, now_s

    def kind_over(self, kind: SectionKind) -> None:
        """The next section of `kind` is over. Where the pass has none, its time is the next section's."""
        for position, section in enumerate(self._sections):
            if position >= self._over and section.kind is kind:
                self.count_over(position + 1)
                return

    def end(self) -> None:
        """All sections of the pass are over; those that nobody told of, at once."""
        if self._over < len(self._sections):
            self.count_over(len(self._sections))
        self.passes.append(self._times)
