"""A few rows of states.json; `make states` compares all of them."""

import json
import re

import pytest

from tests.golden.states import GOLDEN, not_comparable, states
from tests.support.installation import THIS

ROWS = "config logistic_regression np (2 device|3 emulated)"


def test_an_example_trains_to_the_recorded_bits() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if reason := not_comparable(golden, THIS):
        pytest.skip(reason)
    recorded = {row: digest for row, digest in golden["states"].items() if re.search(ROWS, row)}
    assert len(recorded) == 2
    assert dict(states(THIS, ROWS)) == recorded
