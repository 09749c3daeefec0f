"""What the clock of sections makes of the sections that are reported."""

import time

import pytest

from sambasim.ir.graph import Section, SectionKind
from sambasim.runtime.section_clock import SectionClock

KINDS = ("FWD", "BCKWD", "REDUCE", "OPT", "OPT", "GATHER")
SECTIONS = [Section(index, SectionKind(kind), f"net__{index}", index, index + 1) for index, kind in enumerate(KINDS)]


def rows(clock: SectionClock) -> list[tuple[int, ...]]:
    """The indices of the sections of each time of the last pass."""
    return [tuple(section.index for section in one.sections) for one in clock.passes[-1]]


def test_each_section_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0

    def clock_ns() -> int:
        return now_ns

    monkeypatch.setattr(time, "perf_counter_ns", clock_ns)
    clock = SectionClock()
    clock.begin(SECTIONS)
    for number, section in enumerate(SECTIONS):
        now_ns = 10**9 * 2**number
        clock.sections_end(0, [section], now_ns // 2)
    clock.end()
    assert rows(clock) == [(index,) for index in range(6)]
    assert [one.elapsed_s for one in clock.passes[-1]] == [2.0**number / 2 for number in range(6)]


def test_sections_that_are_reported_together_have_one_time() -> None:
    clock = SectionClock()
    for _ in range(2):
        clock.begin(SECTIONS)
        clock.sections_end(0, SECTIONS[:2], 0)
        clock.sections_end(0, SECTIONS[2:], 0)
        clock.end()
    assert rows(clock) == [(0, 1), (2, 3, 4, 5)]
    assert len(clock.passes) == 2


@pytest.mark.parametrize("reported", [0, 2, 6])
def test_a_pass_has_all_its_sections(reported: int) -> None:
    clock = SectionClock()
    clock.begin(SECTIONS)
    for section in SECTIONS[:reported]:
        clock.sections_end(0, [section], 0)
    clock.end()
    assert [index for row in rows(clock) for index in row] == list(range(6))
