"""Families made of linear layers and embeddings."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch, Case

FEATURES, CLASSES, ITEMS, BAG = 12, 5, 40, 6


class LogisticRegression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin_layer(x)


class Perceptron(nn.Module):
    """Holds a plain tensor attribute, which is in no state_dict, and a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, CLASSES)
        self.forgotten = nn.Linear(3, 3)
        self.scale = torch.tensor([0.5, 2.0]).repeat(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) * self.scale)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, FEATURES), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Recommender(nn.Module):
    """The score of an item for a user who is known by a bag of items; subclasses choose how bags are pooled."""

    mode = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ITEMS, 8, mode=self.mode)
        self.item = nn.Embedding(ITEMS, 8)
        self.score = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        user = self.pool(history)
        return self.score(torch.cat((user, self.item(item)), dim=1)).squeeze(1)

    def pool(self, history: Tensor) -> Tensor:
        return self.bag(history)


class SumRecommender(Recommender):
    """Bags lie end to end in one list of items, and offsets say where each begins."""

    mode = "sum"

    def pool(self, history: Tensor) -> Tensor:
        offsets = torch.arange(0, history.numel(), history.shape[1])
        return self.bag(history.flatten(), offsets)


class MaxRecommender(Recommender):
    mode = "max"


class OwnLoss(nn.Module):
    """Returns (loss, outputs…) as SambaFlow's models do, with more outputs than one, of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.hidden(x))
        logits = self.head(hidden)
        return F.cross_entropy(logits, label, label_smoothing=0.1), logits, hidden


def _classification(batch_size: int, generator: torch.Generator) -> Batch:
    return (
        torch.randn(batch_size, FEATURES, generator=generator),
        torch.randint(CLASSES, (batch_size,), generator=generator),
    )


def _classification_by_name(batch_size: int, generator: torch.Generator) -> Batch:
    return {
        "label": torch.randint(CLASSES, (batch_size,), generator=generator),
        "x": torch.randn(batch_size, FEATURES, generator=generator),
    }


def _reconstruction(batch_size: int, generator: torch.Generator) -> Batch:
    x = torch.rand(batch_size, FEATURES, generator=generator)
    return x, x


def _ratings(batch_size: int, generator: torch.Generator) -> Batch:
    return (
        torch.randint(ITEMS, (batch_size, BAG), generator=generator),
        torch.randint(ITEMS, (batch_size,), generator=generator),
        torch.rand(batch_size, generator=generator),
    )


CASES = (
    Case("logistic_regression", LogisticRegression, _classification, "cross_entropy", "the smallest model"),
    Case(
        "mlp", Perceptron, _classification, "cross_entropy", "a plain tensor attribute and an unused layer",
        unused=("forgotten.weight", "forgotten.bias"),
    ),
    Case("autoencoder", Autoencoder, _reconstruction, "mse", "regression on a tensor as large as the input"),
    Case("embedding_bag_mean", Recommender, _ratings, "mse", "two inputs, both of integers; bags pooled by their mean"),
    Case("embedding_bag_sum", SumRecommender, _ratings, "mse", "bags given by offsets"),
    Case("embedding_bag_max", MaxRecommender, _ratings, "mse", "bags pooled by their maximum"),
    Case("own_loss", OwnLoss, _classification_by_name, None, "(loss, outputs…), inputs bound by name in another order"),
)  # fmt: skip
