"""What the clock of sections makes of what it is told."""

import itertools
import time

import pytest

from sambasim.ir.graph import Section, SectionKind
from sambasim.runtime.section_clock import SectionClock

KINDS = ("FWD", "BCKWD", "REDUCE", "OPT", "OPT", "GATHER")
SECTIONS = [Section(index, SectionKind(kind), f"net__{index}", index, index + 1) for index, kind in enumerate(KINDS)]


def rows(clock: SectionClock) -> list[tuple[int, ...]]:
    """The indices of the sections of each time of the last pass."""
    return [tuple(section.index for section in one.sections) for one in clock.passes[-1]]


def test_each_section_that_is_told_of_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments_s = (float(2**number) for number in itertools.count())  # no two differences are alike
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments_s))
    clock = SectionClock()
    clock.begin(SECTIONS)
    clock.count_over(1)
    clock.count_over(2)
    clock.go_on()
    for kind in (SectionKind.REDUCE, SectionKind.OPT, SectionKind.OPT, SectionKind.GATHER):
        clock.kind_over(kind)
    clock.end()
    assert rows(clock) == [(index,) for index in range(6)]
    forward_s, backward_s, reduce_s, *_ = (one.elapsed_s for one in clock.passes[-1])
    assert (forward_s, backward_s) == (2 - 1, 4 - 2)
    assert reduce_s == 16 - 8, "what came between, from 4 to 8, is no part of it"


def test_what_is_told_together_has_one_time() -> None:
    clock = SectionClock()
    clock.begin(SECTIONS)
    clock.count_over(2)
    clock.end()
    assert rows(clock) == [(0, 1), (2, 3, 4, 5)]


def test_a_kind_that_the_pass_does_not_have_is_part_of_the_next() -> None:
    clock = SectionClock()
    for _ in range(2):
        clock.begin(SECTIONS)
        clock.count_over(2)
        clock.kind_over(SectionKind.GRADNORM)
        clock.kind_over(SectionKind.OPT)
        clock.kind_over(SectionKind.FWD)  # it is over already
        clock.end()
    assert rows(clock) == [(0, 1), (2, 3), (4, 5)]
    assert len(clock.passes) == 2


@pytest.mark.parametrize("told", [0, 6])
def test_a_pass_has_all_its_sections(told: int) -> None:
    clock = SectionClock()
    clock.begin(SECTIONS)
    for count in range(1, told + 1):
        clock.count_over(count)
    clock.end()
    assert sum(rows(clock), ()) == tuple(range(6))
