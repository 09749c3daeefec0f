"""A minute of what `python -m tests.faults.soak` measures for ten: ranks with data workers do not grow."""

from pathlib import Path

import pytest

from tests.faults.soak import MOST_KB, prepare, slopes
from tests.support.whole import whole


@whole
@pytest.mark.timeout(300)
def test_ranks_with_data_workers_do_not_grow(tmp_path: Path) -> None:
    prepare(tmp_path)
    found = slopes(tmp_path, "workers", seconds=60)
    assert len(found) == 2
    assert max(grown for grown, _ in found) < MOST_KB
