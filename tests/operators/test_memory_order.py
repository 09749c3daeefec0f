"""Parameters and buffers whose axes lie in another order in memory: kernels choose by it, and round differently."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.parity.test_blocks import check_bits


class Transposed(nn.Module):
    """Trained, frozen, fixed and written. Not every CPU rounds its products by their order: see `orthogonal` too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.frozen = (nn.Parameter(torch.randn(40, 24).t()) for _ in range(2))
        self.frozen.requires_grad_(False)
        self.fixed: Tensor
        self.seen: Tensor
        self.register_buffer("fixed", torch.linalg.qr(torch.randn(24, 24)).Q)
        self.register_buffer("seen", torch.zeros(24, 32).t())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = x @ self.weight @ self.frozen.t() @ self.fixed
        if self.training:
            self.seen.mul_(0.9).add_(made.detach())
        return (made + self.seen).square().mean(), made


class ChannelsLast(nn.Module):
    """Also with axes of length 1, of which operators read the strides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = (nn.Conv2d(channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(*first, nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
        nn.utils.convert_conv2d_weight_memory_format(self, torch.channels_last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.body(x)
        return made.square().mean(), made


SAMPLES = torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("net", [Transposed(), ChannelsLast(1), ChannelsLast(3)])
def test_a_step_and_an_evaluation_have_the_bits_of_eager(net: nn.Module, tmp_path: Path) -> None:
    if isinstance(net, ChannelsLast):
        x = SAMPLES[:, : net.body[0].in_channels].contiguous()
    else:
        x = SAMPLES[:, 0, :4, :6].reshape(32, 24)
    _, evaluated = check_bits(net, {"x": x}, tmp_path)
    assert all(torch.equal(*pair) for pair in evaluated)
