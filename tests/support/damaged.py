"""A model with BatchNorm, and samples of which some are not finite, or overflow."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sambasim.options.compile import compile_options

SAMPLES = 48
BATCH = 4
SOURCE = "tests.support.damaged:samples"
OVERFLOWS = "1e30"
"""As a target: finite, and so is its gradient, but the loss is not."""


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = self.last(torch.relu(self.norm(self.first(x)))).squeeze(1)
        return ((y - target) ** 2).mean(), y


def samples(inputs: Mapping[str, str] | None = None, targets: Mapping[str, str] | None = None) -> TensorDataset:
    """Samples of `Net`; those numbered in `inputs` and `targets` have that value in place of one of theirs: `nan`, say,
    which no number of a config may be."""
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, generator=generator)
    for number, value in (inputs or {}).items():
        x[int(number), 2] = float(value)
    for number, value in (targets or {}).items():
        target[int(number)] = float(value)
    return TensorDataset(x, target)


def compiled(folder: Path, *overrides: str, width: int = 16) -> Path:
    """A PEF of `Net`, data parallel, that trains on sound samples in their order."""
    from tests.support.compiled import compile_from_options  # every rank imports this file, for its samples

    given = (f"data.source={SOURCE}", "data.shuffle=false", f"model.args.width={width}", *overrides)
    flags = {"output_folder": folder, "batch_size": BATCH, "data_parallel": True}
    return compile_from_options(compile_options(None, "tests.support.damaged:Net", list(given), flags)).path
