"""Every row of the table: the message, the exit code, and what is left. See `kinds` for the rows."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.fault import Fault
from tests.faults.kinds import ALL, WAYS_IN


@pytest.mark.parametrize("fault", ALL.values(), ids=ALL)
def test_bad_input_is_told(fault: Fault, tmp_path: Path, compiled: Mapping[str, bytes]) -> None:
    fault.check(tmp_path, compiled)


def test_the_table_is_large_and_no_row_hides_another() -> None:
    assert len(ALL) == sum(map(len, WAYS_IN.values())) >= 100
    assert all(len(faults) >= 5 for faults in WAYS_IN.values())
