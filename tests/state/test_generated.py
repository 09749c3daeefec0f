"""Nets composed at random are equal to eager PyTorch or refused, and equal where all of it can be captured."""

import pytest

from tests.state.generated import generate, judge
from tests.support.whole import is_whole


@pytest.mark.parametrize("seed", range(500 if is_whole() else 30))
def test_a_net_is_equal_or_refused(seed: int) -> None:
    net = generate(seed)
    found, wrong = judge(net)
    assert not wrong, f"{', '.join(net.names)}\n{found}\n{net.source}"
