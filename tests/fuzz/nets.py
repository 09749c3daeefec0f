"""The models and the data of the files that are mutated: small, and with every kind of section."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def rows() -> TensorDataset:
    """16 samples of 8 numbers, each with a class from 0 to 2."""
    return TensorDataset(torch.randn(16, 8), torch.arange(16) % 3)


def tokens() -> TensorDataset:
    """16 rows of 6 tokens out of 11, and those that follow."""
    drawn = torch.randint(11, (16, 7))
    return TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


class Dense(nn.Sequential):
    """Two layers with dropout between them, to logits."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))


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
