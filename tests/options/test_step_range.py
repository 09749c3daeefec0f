"""Ranges of steps, as they are typed."""

import pytest

from sambasim.errors import OptionError
from sambasim.options import run_options
from sambasim.options.problems import Refused
from sambasim.options.step_range import StepRange, step_range


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (None, StepRange(1, None)),
        ("17", StepRange(17, 17)),
        ("100-120", StepRange(100, 120)),
        ("100-", StepRange(100, None)),
        ("-20", StepRange(1, 20)),
        (" 3-3 ", StepRange(3, 3)),
    ],
)
def test_steps_are_read(text: str | None, meant: StepRange) -> None:
    assert step_range(text) == meant


@pytest.mark.parametrize("text", ["", "-", "0", "0-4", "4-3", "a", "1-2-3", "1.5", "1,2", "٣", "9" * 19])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        step_range(text)


def test_a_range_has_its_ends() -> None:
    assert [step for step in range(1, 9) if step in StepRange(3, 5)] == [3, 4, 5]
    assert [step for step in range(1, 9) if step in StepRange(7)] == [7, 8]


def test_a_run_that_is_told_both_wrongs_says_both() -> None:
    with pytest.raises(OptionError) as error:
        run_options({"pef": "net", "record_steps": "4-3"}, [])
    assert "says which steps are recorded, and no digests are asked for" in str(error.value)
    assert "ends before it begins" in str(error.value)
