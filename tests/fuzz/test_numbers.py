"""Numbers in files that nobody expects: in each format a few of them by default, all with SAMBASIM_TEST=whole."""

from random import Random

import pytest

from tests.fuzz.number_formats import FORMATS
from tests.fuzz.numbers import cases, check_sound, prepared, run, run_here, try_case
from tests.support.whole import is_whole

SMALL = ("device", "cluster", "metrics", "digests", "checkpoint")
"""The formats that `make test` tries: those with files that are made quickly."""


@pytest.fixture(autouse=True)
def _an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "")  # what `prepared` sets ends with the test


@pytest.mark.timeout(7200 if is_whole() else 120)
@pytest.mark.parametrize("name", FORMATS if is_whole() else SMALL)
def test_a_number_is_taken_or_refused(name: str) -> None:
    tried = cases(name)
    if is_whole():
        check_sound(name)
    else:
        tried = Random(1998).sample(tried, 4)
    for number, value in tried:
        for command, outcome in try_case(name, number, value, run if is_whole() else run_here):
            assert not outcome.fault, f"{prepared(name)[1][number][2]} = {value!r}: {command}\n{outcome.fault}"
