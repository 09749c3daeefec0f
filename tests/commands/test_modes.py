"""Models whose own train() or eval() changes weights are refused at the method, and the remedy is equal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sambasim as ss
from sambasim.commands.proof.eager import _REMEDY
from sambasim.errors import CaptureError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(3, 2))
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T


class Merges(Layer):
    def train(self, mode: bool = True) -> "Merges":
        if mode is self.merged:
            self.a.weight.data += (-1 if mode else 1) * (self.up.data @ self.down.data)
            self.merged = not mode
        super().train(mode)
        return self


class Swaps(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("averaged", self.a.weight.detach().clone())

    def eval(self) -> "Swaps":
        self.a.weight.data.copy_(self.get_buffer("averaged"))
        super().eval()
        return self


class Fuses(Layer):
    fused: Tensor | None = None

    def train(self, mode: bool = True) -> "Fuses":
        self.fused = None if mode else (self.a.weight + self.up @ self.down).detach()
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.fused is None else functional.linear(x, self.fused, self.a.bias)


class Chooses(Layer):
    """What the remedy makes of each; a method that changes no tensor is no obstacle."""

    def train(self, mode: bool = True) -> "Chooses":
        self.switched = mode
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        return functional.linear(x, self.a.weight + self.up @ self.down, self.a.bias)


def _compiled(model: nn.Module, folder: Path, **more: Any) -> ss.Pef:
    example = (torch.ones(4, 4), *([torch.ones(4, 3)] if "loss" not in more else []))
    given = {"loss": "mse", "optimizer": "sgd", **more}
    return ss.compile(model, example, name="net", quiet=True, output_folder=folder, **given)


@pytest.mark.parametrize(
    ("make", "says", "line"),
    [
        (lambda: nn.Sequential(Merges()), "train() of Merges changes model.0.a.weight", "def train(self"),
        (Swaps, "eval() of Swaps changes model.a.weight", "def eval(self"),
        (Fuses, "train() of Fuses changes model.fused", "def train(self"),
    ],
)
def test_a_method_that_changes_weights_is_named(
    make: Callable[[], nn.Module], says: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError) as caught:
        _compiled(make(), tmp_path)
    assert says in caught.value.what
    assert line in (caught.value.where or "")
    assert caught.value.remedy == _REMEDY


def test_the_remedy_and_methods_that_change_no_tensor_are_equal(tmp_path: Path) -> None:
    pef = _compiled(Chooses(), tmp_path)
    assert pef.checked is not None
    assert not pef.checked.rounded


def test_for_inference_the_remedy_is_to_merge_before(tmp_path: Path) -> None:
    layer = Merges()
    inference = {"loss": None, "optimizer": None, "inference": True}
    with pytest.raises(CaptureError, match=r"call model\.eval\(\) before you compile"):
        _compiled(layer, tmp_path, **inference)
    _compiled(layer.eval(), tmp_path, **inference)
