"""The models of the published rows, as far as the publications describe them."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A decoder layer of GPT-2: attention written out, with dropout where Hugging Face's model has it."""

    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(length, length, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(width // self.heads)
        scores = torch.where(self.mask, scores, torch.full((), -1e9))
        attended = self.drop(torch.softmax(scores, -1)) @ v
        x = x + self.drop(self.proj(attended.transpose(1, 2).reshape(batch, length, width)))
        hidden = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        result: Tensor = x + self.drop(self.down(hidden))
        return result


class GPT2(nn.Module):
    """GPT-2 with its head tied to the embedding. The loss is of the logits of all tokens but the last, as Hugging Face
    shifts them. With `gives_logits` the model returns them too, as Hugging Face's does."""

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        length: int,
        vocabulary: int,
        dropout: float = 0.1,
        *,
        gives_logits: bool = True,
    ) -> None:
        super().__init__()
        self.gives_logits = gives_logits
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, length, dropout) for _ in range(layers))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        shifted = logits[:, :-1].contiguous()
        loss = F.cross_entropy(shifted.view(-1, shifted.shape[-1]), targets[:, 1:].reshape(-1))
        return (loss, logits) if self.gives_logits else loss


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    def once(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*once(inputs), *once(outputs))


class UNet(nn.Module):
    """UNet with BatchNorm, four levels deep, and two classes, for images of any `size`."""

    def __init__(self, size: int, channels: int, features: int) -> None:
        super().__init__()
        widths = [features * 2**level for level in range(5)]
        self.down = nn.ModuleList(_twice(*pair) for pair in zip([channels, *widths], widths, strict=False))
        upwards = list(zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in upwards)
        self.merge = nn.ModuleList(_twice(2 * narrow, narrow) for _, narrow in upwards)
        self.out = nn.Conv2d(features, 2, 1)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        kept: list[Tensor] = []
        x = image
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return F.cross_entropy(self.out(x), mask)


def _tokens(batch_size: int, length: int, **sizes: object) -> dict[str, Tensor]:
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens.clone()}


def _images(batch_size: int, size: int, channels: int, **sizes: object) -> dict[str, Tensor]:
    mask = torch.zeros(batch_size, size, size, dtype=torch.int64)
    return {"image": torch.zeros(batch_size, channels, size, size), "mask": mask}


MODELS: Mapping[str, tuple[Callable[..., nn.Module], Callable[..., dict[str, Tensor]]]]
MODELS = {"gpt2": (GPT2, _tokens), "unet": (UNet, _images)}
"""By name: the functions that make the model and a batch of its inputs."""
