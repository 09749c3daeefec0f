"""The models of the PEFs that are fuzzed, and their data: small, and with every kind of section."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def rows() -> TensorDataset:
    """16 samples of 8 numbers, each with a class from 0 to 2."""
    return TensorDataset(torch.randn(16, 8), torch.arange(16) % 3)


def pictures() -> TensorDataset:
    """16 pictures of 8 by 8, each with a class."""
    return TensorDataset(torch.randn(16, 1, 8, 8), torch.arange(16) % 3)


def tokens() -> TensorDataset:
    """16 rows of 6 tokens out of 11, and those that follow."""
    drawn = torch.randint(11, (16, 7))
    return TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


class Dense(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        """To logits."""
        logits: Tensor = self.layers(x)
        return logits


class Convolution(nn.Module):
    """A convolution, BatchNorm and both kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)
        )
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """To logits."""
        logits: Tensor = self.last(self.layers(x).flatten(1))
        return logits


class Gpt(nn.Module):
    """One block of attention, which returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, x: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """To (loss, logits)."""
        hidden = self.embed(x)
        q, k, v = self.mix(self.norm(hidden)).view(*x.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(hidden + mixed.transpose(1, 2).reshape(hidden.shape))
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten()), logits


class Recurrent(nn.Module):
    """An LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 11)

    def forward(self, x: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """To (loss, logits)."""
        logits = self.head(self.lstm(self.embed(x))[0])
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten()), logits


_NAMED = "--set loss.name=cross_entropy"
COMPILATIONS: Mapping[str, str] = {
    "dense": f"Dense rows {_NAMED} --set optimizer.name=sgd --set optimizer.momentum=0.9",
    "parallel": f"Dense rows {_NAMED} --set optimizer.name=adamw --data-parallel --set data.evaluation_fraction=0.3",
    "convolution": f"Convolution pictures {_NAMED} --set optimizer.name=adam --set optimizer.max_grad_norm=0.5",
    "gpt": "Gpt tokens --set optimizer.name=adamw --data-parallel --set data.evaluation_fraction=0.4 --o1",
    "recurrent": "Recurrent tokens --set optimizer.name=sgd",
    "guess": f"Dense rows {_NAMED} --inference",
    "narrow": f"Dense rows {_NAMED} --set optimizer.name=sgd --set compile.dtype=bf16 --data-parallel",
}
"""By name of the PEF: model, data, and the rest of what `compile` is told."""
