"""The models of the zoo that convolve, and their batches."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.resnet import ResNet
from tests.models.case import CLASSES, Batch, in_order, integers, shares

SIDE = 8


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(6 * (SIDE // 2) ** 2, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(image))), 2)
        return self.head(self.drop(x.flatten(1)))


class UNet(nn.Module):
    """Two levels; what goes down by pooling comes up by bilinear interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.bottom = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.merge = nn.Conv2d(12, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = torch.relu(self.down(image))
        coarse = F.relu(self.bottom(F.avg_pool2d(fine, 2)), inplace=True)
        return self.head(torch.relu(self.merge(torch.cat((fine, self.up(coarse)), dim=1))))


class Separable(nn.Module):
    """A depthwise, a pointwise, a dilated and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4)
        self.pointwise = nn.Conv2d(4, 8, 1)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.transposed = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.silu(self.pointwise(self.depthwise(image)))
        return self.transposed(F.hardswish(self.dilated(x)))


class Normalized(nn.Module):
    """GroupNorm and InstanceNorm, whose statistics are of one sample, and a one-dimensional convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.along = nn.Conv1d(8, 4, 5, stride=2)
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = F.leaky_relu(self.group(self.conv1(image)), 0.1)
        x = F.elu(self.instance(self.conv2(x)))
        return self.head(F.adaptive_max_pool1d(self.along(x.flatten(2)), 6).flatten(1))


def normalized() -> nn.Module:
    """A lazy layer takes its shape from the first batch that it sees."""
    module = Normalized()
    module(torch.zeros(1, 1, SIDE, SIDE))
    return module


def resnet() -> nn.Module:
    return ResNet(width=4)


images = in_order(shares(1, SIDE, SIDE), integers(CLASSES))


def masks(batch_size: int, generator: torch.Generator) -> Batch:
    image = torch.rand(batch_size, 1, SIDE, SIDE, generator=generator)
    return image, (image > 0.5).float()


def pictures(batch_size: int, generator: torch.Generator) -> Batch:
    image = torch.rand(batch_size, 4, SIDE, SIDE, generator=generator)
    return image, image.flip(3)
