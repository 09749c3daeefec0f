"""A live model with its data, compiled and trained by the Python API, and by an eager loop; shared PEFs."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import sambasim as ss

POINTS = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
LABELS = (POINTS.norm(dim=1) > 1.2).long()
TRAIN, HELD_OUT = (POINTS[:320], LABELS[:320]), (POINTS[320:], LABELS[320:])
BATCH = (POINTS[:32], LABELS[:32])
X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
SMALL = X, (X.sum(1) > 0).long()
STEPS = 4
IN_ORDER: dict[str, Any] = {"threads": 1, "set": {"data.shuffle": False}}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


def compiled(folder: Path, model: nn.Module, example: object = BATCH, **options: Any) -> ss.Pef:
    return ss.compile(model, example, quiet=True, output_folder=folder, **{"name": "other", "check": 2, **options})


def trained(pef: ss.Pef, data: object = TRAIN, **options: Any) -> ss.Run:
    return ss.run(pef, data, quiet=True, **{"steps": STEPS, **options})


def sgd(model: nn.Module, rate: float = 0.1) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def batches(x: Tensor, y: Tensor, steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return [(x[size * step : size * (step + 1)], y[size * step : size * (step + 1)]) for step in range(steps)]


def eager(
    model: nn.Module,
    optimizer: Optimizer,
    data: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Any, Tensor], Tensor] = cross_entropy,
    *,
    before: Callable[[int], object] = lambda step: None,
    clip: float | None = None,
    scheduler: Any = None,
) -> list[float]:
    losses = []
    for step, (x, y) in enumerate(data):
        before(step)
        value = loss(model(x), y)
        losses.append(value.item())
        optimizer.zero_grad()
        torch.autograd.backward(value)
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pefs")


@pytest.fixture(scope="module")
def pef(folder: Path) -> ss.Pef:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    two: dict[str, Any] = {"data_parallel": True, "world_size": 2, "name": "net"}
    return compiled(folder, model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, **two)
