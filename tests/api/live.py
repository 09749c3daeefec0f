"""A live model with its data, compiled and trained by the Python API."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import sambasim as ss

POINTS = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
LABELS = (POINTS.norm(dim=1) > 1.2).long()
TRAIN, HELD_OUT = (POINTS[:320], LABELS[:320]), (POINTS[320:], LABELS[320:])
BATCH = (POINTS[:32], LABELS[:32])


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


def compiled(folder: Path, model: nn.Module, example: object = BATCH, **options: Any) -> ss.Pef:
    return ss.compile(model, example, quiet=True, output_folder=folder, **{"name": "other", **options})


def trained(pef: ss.Pef, data: object = TRAIN, **options: Any) -> ss.Run:
    return ss.run(pef, data, quiet=True, **{"steps": 4, **options})
