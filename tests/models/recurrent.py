"""Families made of recurrent layers."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn

from tests.models.case import Batch, Case

WORDS, LENGTH, FEATURES, CLASSES = 30, 7, 6, 5


class LSTMClassifier(nn.Module):
    """Words in, a class out. The dropout lies between the two layers, where a trace can lose it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 10, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        return self.head(states[:, -1])


class BidirectionalLSTM(nn.Module):
    """Reads raw floats in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 8, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0].mean(dim=1))


class GRUClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.gru(x)
        return self.head(last[-1])


def _sentences(batch_size: int, generator: torch.Generator) -> Batch:
    return (
        torch.randint(WORDS, (batch_size, LENGTH), generator=generator),
        torch.randint(CLASSES, (batch_size,), generator=generator),
    )


def _sequences(batch_size: int, generator: torch.Generator) -> Batch:
    return (
        torch.randn(batch_size, LENGTH, FEATURES, generator=generator),
        torch.randint(CLASSES, (batch_size,), generator=generator),
    )


CASES = (
    Case("lstm", LSTMClassifier, _sentences, "cross_entropy", "dropout between layers must survive capture"),
    Case("lstm_bidirectional", BidirectionalLSTM, _sequences, "cross_entropy", "an LSTM on raw float input"),
    Case(
        "gru", GRUClassifier, _sequences, "cross_entropy", "unrolled over time, and so off by about 1e-8",
        exact=False,
    ),
)  # fmt: skip
