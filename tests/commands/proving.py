"""A small model that draws, normalizes and has a constant; its options; and its proof."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sambasim.commands.child import OnPhase
from sambasim.commands.compile import compile_proved
from sambasim.commands.proof.eager import LiveModel
from sambasim.compiler.capture.step import Example
from sambasim.options.compile import CompileOptions
from sambasim.pef.document import Checked, Compiled

BATCH, FEATURES, CLASSES = 8, 6, 4


class Net(nn.Module):
    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.last, self.scale = nn.Linear(16, CLASSES), scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).relu())
        h = self.drop(h)
        h = h * self.scale
        return self.last(h)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def halved(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss of the user's own."""
    return nn.functional.cross_entropy(outputs, target) / 2


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


def proved(
    folder: Path,
    model: nn.Module | None = None,
    /,
    given: Mapping[str, Tensor] | None = None,
    on_phase: OnPhase = lambda phase: None,
    **changes: object,
) -> Compiled:
    """The proof of `model`, which is captured with the inputs of the example if none are `given`."""
    chosen = options(folder, **changes)
    example, whole = given or inputs(chosen.micro_batch_size), None if given else inputs()
    subject = LiveModel(model or Net(), Example(example), whole=whole)
    return compile_proved(subject, chosen, on_phase)


def checked(folder: Path, model: nn.Module | None = None, /, **changes: Any) -> Checked:
    found = proved(folder, model, **changes).checked
    assert found is not None
    return found
