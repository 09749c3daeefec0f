"""The mean over replicas: the tree's order, whatever aliases and chunks there are."""

import pytest
import torch
from torch import Tensor

from sambasim.runtime.sync.mean import CHUNK_ELEMENTS, tree_mean


def _operands(count: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count * 1000 + numel)
    return [torch.randn(numel, generator=generator) * 10.0 ** (rank % 5) for rank in range(count)]


def _by_hand(operands: list[Tensor]) -> Tensor:
    """The tree written out for up to seven operands."""
    o = operands
    pair = [o[i] + o[i + 1] if i + 1 < len(o) else o[i] for i in range(0, len(o), 2)]
    quad = [pair[i] + pair[i + 1] if i + 1 < len(pair) else pair[i] for i in range(0, len(pair), 2)]
    total = quad[0] + quad[1] if len(quad) > 1 else quad[0]
    return total / len(o)


@pytest.mark.parametrize("numel", [0, 1, 64, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 64])
@pytest.mark.parametrize("count", range(1, 8))
def test_the_bits_are_those_of_the_tree(count: int, numel: int) -> None:
    operands = _operands(count, numel)
    out = torch.empty(numel)
    tree_mean(operands, out, len(operands))
    assert torch.equal(out, _by_hand(operands))


@pytest.mark.parametrize("count", range(1, 8))
def test_the_mean_may_replace_any_of_the_operands(count: int) -> None:
    for own in range(count):
        operands = _operands(count, 200)
        expected = _by_hand(operands)
        tree_mean(operands, operands[own], len(operands))
        assert torch.equal(operands[own], expected)


def test_the_order_matters_so_that_this_test_can_fail() -> None:
    operands = _operands(5, 4096)
    left_to_right = operands[0] + operands[1] + operands[2] + operands[3] + operands[4]
    assert not torch.equal(left_to_right / 5, _by_hand(operands))


def test_a_missing_leaf_is_skipped_so_that_a_negative_zero_stays_one() -> None:
    operands = [torch.tensor([-0.0])] * 3
    out = torch.empty(1)
    tree_mean(operands, out, len(operands))
    assert str(out.item()) == "-0.0"


@pytest.mark.parametrize("count", [2, 4])
def test_a_power_of_two_divides_with_the_bits_of_a_division_down_to_the_smallest_numbers(count: int) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (64 * 1024,), generator=torch.Generator().manual_seed(count))
    total = bits.to(torch.int32).view(torch.float32).nan_to_num(0.0)
    tiny = torch.arange(1, 65, dtype=torch.int32).view(torch.float32)  # the subnormal numbers next to zero
    for sums in (total, tiny):
        operands = [sums, *(torch.zeros_like(sums) for _ in range(count - 1))]
        out = torch.empty_like(sums)
        tree_mean(operands, out, count)
        assert torch.equal(out.view(torch.int32), ((sums + 0.0) / count).view(torch.int32))
