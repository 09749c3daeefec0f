"""The PEFs that the tests of the Python API share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sambasim as ss
from tests.api.live import compiled, net


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pefs")


@pytest.fixture(scope="module")
def pef(folder: Path) -> ss.Pef:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    two: dict[str, Any] = {"data_parallel": True, "world_size": 2, "name": "net"}
    return compiled(folder, model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, **two)
