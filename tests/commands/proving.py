"""A small model that draws, normalizes and has a constant; its options; and its proof."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from pathlib import Path

import torch
from torch import Tensor, nn

from sambasim.commands.compile import Proved, compile_proved
from sambasim.commands.proof.eager import LiveModel
from sambasim.options.compile import CompileOptions

BATCH, FEATURES, CLASSES = 8, 6, 4


class Net(nn.Module):
    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).relu())
        h = self.drop(h)
        h = h * self.scale
        return self.last(h)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Quarter(Net):
    """Another model with the same tensors."""

    def __init__(self) -> None:
        super().__init__(0.25)


def inputs(samples: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return {"x": x[:samples], "target": torch.randint(CLASSES, (BATCH,), generator=generator)[:samples]}


def options(folder: Path, **changes: object) -> CompileOptions:
    parts: dict[str, object] = {
        "model": {"target": "tests.commands.proving:Net"},
        "loss": {"name": "cross_entropy"},
        "optimizer": {"name": "adamw"},
        "training": {"batch_size": BATCH},
        "pef_name": "net",
        "output_folder": folder,
    }
    return CompileOptions.model_validate(parts | changes)


def proved(folder: Path, model: nn.Module | None = None, /, **changes: object) -> Proved:
    chosen = options(folder, **changes)
    subject = LiveModel(model or Net(), inputs(chosen.micro_batch_size), by_keyword=False, whole=inputs())
    return compile_proved(subject, chosen)
