"""A model of one layer whose PEF is loaded, and training on the host beside the device."""

import pytest
import torch
from torch import nn

from tests.samba.harness import Load, Made, with_sgd

BATCH = [torch.ones(2, 3)]


def made_linear() -> Made:
    return with_sgd(lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), momentum=0.9)


@pytest.fixture
def linear(load: Load) -> Made:
    return load(made_linear, BATCH)


def train_on_host(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(*BATCH).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
