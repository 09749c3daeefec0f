"""Nets composed at random are equal to eager PyTorch or refused, and equal where all of it can be captured."""

from pathlib import Path

import pytest

from tests.state.generated import generate, judge
from tests.support.whole import is_whole


@pytest.mark.parametrize("seed", range(500 if is_whole() else 30))
def test_a_net_is_equal_or_refused(seed: int, tmp_path: Path) -> None:
    one = generate(seed)
    found, wrong = judge(one, tmp_path)
    assert not wrong, f"{', '.join(one.names)}\n{found}\n{one.source}"
