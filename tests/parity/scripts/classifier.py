"""An image classifier: augmentation in the data set, rare classes that are drawn more often and count more, the F1
score of held-out images after each step, an early end, and the weights of the best evaluation."""

# Calling a module gives Any.
# mypy: no-warn-return-any, allow-untyped-calls

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassF1Score

from tests.parity.scripts import BATCH, STEPS, Built, Trained, generator

CLASSES, SIDE, HELD_OUT, PATIENCE = 4, 8, 37, 3
WEIGHTS = torch.tensor([1.0, 1.0, 2.0, 4.0])
HOW = {"loss": nn.CrossEntropyLoss(weight=WEIGHTS), "set": {"loss.mean_over": "elements"}}
RUN = {
    "evaluation_metrics": "f1", "evaluate_every": "1", "keep_best": "f1", "stop_after": PATIENCE,
    "load_best": True,
}  # fmt: skip
ACCUMULATED = 1


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images, of which some are mirrored and all have noise: the same in every run."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn, image = generator(index), self.images[index]
        if torch.rand((), generator=drawn) < 0.5:
            image = image.flip(-1)
        return image + 0.3 * torch.randn(image.shape, generator=drawn), self.labels[index]


def build() -> Built:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(convolution, nn.Linear(8 * (SIDE // 2) ** 2, CLASSES))
    return Built(model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)], [])


def data() -> tuple[DataLoader[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Images to train on, and the held-out ones with their labels."""
    count = STEPS * BATCH + HELD_OUT
    labels = torch.multinomial(1 / WEIGHTS, count, replacement=True, generator=generator(2))
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator(3))
    images = 0.4 * patterns[labels] + torch.randn(count, 1, SIDE, SIDE, generator=generator(4))
    train = Augmented(images[:-HELD_OUT], labels[:-HELD_OUT])
    often = WEIGHTS[train.labels].sqrt()
    sampler = WeightedRandomSampler(often.tolist(), len(train), generator=generator(5))
    return DataLoader(train, BATCH, sampler=sampler), (images[-HELD_OUT:], labels[-HELD_OUT:])


def in_pytorch(replicas: int) -> Trained:
    model, (optimizer,), _ = build()
    loader, (images, labels) = data()
    criterion, metric = nn.CrossEntropyLoss(weight=WEIGHTS), MulticlassF1Score(CLASSES)
    losses, scores = list[float](), list[float]()
    best, best_weights, worse = -1.0, model.state_dict(), 0
    for x, target in loader:
        loss = criterion(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            scores.append(metric(model(images), labels).item())
        metric.reset()
        worse += 1
        if scores[-1] > best:
            best, best_weights, worse = scores[-1], copy.deepcopy(model.state_dict()), 0
        if worse == PATIENCE:
            break
    return Trained(losses, best_weights, scores=scores)
