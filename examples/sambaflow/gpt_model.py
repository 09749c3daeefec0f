"""A small GPT of characters and the text that it reads: plain PyTorch, which the app `gpt.py` trains on a device.

The text is that of Python's own `help("topics")`, the language reference that every Python carries in
`pydoc_data.topics`: nothing is downloaded. It differs a little from one release of Python to the next; the alphabet is
fixed, so that the model does not.
"""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""Printable ASCII; any other character is read as a question mark."""


class GPT(nn.Module):
    """`(tokens, targets)`, both int64 `[batch, length]`, to `(loss, logits)`: a mean, and `[batch, length, 96]`.

    `length` is the longest that it can read.
    """

    def __init__(self, length: int, layers: int = 2, heads: int = 4, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.register_buffer("later", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=self.later, is_causal=True)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def windows(length: int) -> TensorDataset:
    """The text in windows of `length` characters: sample i is `(tokens, targets)`, int64 `[length]`, where the targets
    are the tokens one character later."""
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    unknown = ALPHABET.index("?")
    places = {character: place for place, character in enumerate(ALPHABET)}
    characters = torch.tensor([places.get(character, unknown) for character in whole])
    pieces = characters.unfold(0, length + 1, length)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])
