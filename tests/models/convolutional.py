"""Families made of convolutions."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch, Case

SIDE, CLASSES = 8, 5


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


class Block(nn.Module):
    """A residual block; where the stride is 2, the shortcut is a convolution too."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return torch.relu(y + self.shortcut(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 8, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(image))).flatten(1))


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
        coarse = torch.relu(self.bottom(F.avg_pool2d(fine, 2)))
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


def _images(batch_size: int, generator: torch.Generator) -> Batch:
    return (
        torch.rand(batch_size, 1, SIDE, SIDE, generator=generator),
        torch.randint(CLASSES, (batch_size,), generator=generator),
    )


def _masks(batch_size: int, generator: torch.Generator) -> Batch:
    image = torch.rand(batch_size, 1, SIDE, SIDE, generator=generator)
    return image, (image > 0.5).float()


def _pictures(batch_size: int, generator: torch.Generator) -> Batch:
    image = torch.rand(batch_size, 4, SIDE, SIDE, generator=generator)
    return image, image.flip(3)


CASES = (
    Case(
        "cnn", Convolutional, _images, "cross_entropy", "BatchNorm buffers, dropout, max pooling",
        zero_gradients=("conv.bias",),
    ),
    Case("resnet", Residual, _images, "cross_entropy", "shortcuts, strides, an in-place ReLU"),
    Case("unet", UNet, _masks, "mse", "bilinear upsampling, concatenation"),
    Case("separable", Separable, _pictures, "mse", "depthwise, dilated and transposed convolutions"),
    Case(
        "normalized", normalized, _images, "cross_entropy",
        "GroupNorm, InstanceNorm, a lazy layer; a function builds it",
        zero_gradients=("conv2.bias",),
    ),
)  # fmt: skip
