"""A GPT that writes character by character, and learns to from English text that every Python carries.

It shows a Transformer with tied weights, data from a function of one's own, and a model that returns `(loss, logits)`,
as SambaFlow's models do: no loss is named in the config. In 300 steps on two replicas the loss on held-out text
falls from 4.5 to 2.1 nats a character; with more steps it goes on falling.

    sambasim compile configs/char_gpt.toml --data-parallel -ws 2
    mpirun -np 2 sambasim run --pef char_gpt --reduce-on-rdu

The text is that of Python's own `help("topics")`, the language reference in `pydoc_data.topics`: nothing is downloaded.
It differs a little from one release of Python to the next; the alphabet is fixed, so that the model does not.
"""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""Printable ASCII; any other character is read as a question mark."""


class Attention(nn.Module):
    """Each position `[batch, length, width]` attends to itself and to what is before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then two linear layers, each added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """`(tokens, targets)`, both int64 `[batch, length]`, to `(loss, logits)`: a mean, and `[batch, length, 96]`.

    `length` is the longest that it can read. The defaults make 0.8 million parameters.
    """

    def __init__(self, layers: int = 4, heads: int = 4, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def _initialize(module: nn.Module) -> None:
    """As in GPT-2: small weights, because tied embeddings are also logits; no biases to begin with."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def text(length: int = 64, held_out: int = 20) -> tuple[TensorDataset, TensorDataset]:
    """The text in windows of `length` characters: those to train on, and every `held_out`-th, to evaluate on.

    A sample is `(tokens, targets)`, both int64 `[length]`: a window, and the same one character later.
    """
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    unknown = ALPHABET.index("?")
    places = {character: place for place, character in enumerate(ALPHABET)}
    characters = torch.tensor([places.get(character, unknown) for character in whole])
    windows = characters.unfold(0, length + 1, length)
    evaluated = torch.arange(len(windows)) % held_out == held_out - 1
    parts = (windows[~evaluated], windows[evaluated])
    train, evaluation = (TensorDataset(part[:, :-1], part[:, 1:]) for part in parts)
    return train, evaluation
