"""Hooks on gradients: those of modules are in the graph, with the bits of eager PyTorch; those of parameters are
refused, with what does the same."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.errors import CaptureError, ModelError
from sambasim.runtime.machine.process import Stream, derive
from tests.api.conftest import IN_ORDER, SMALL, STEPS, compiled, eager, sgd, trained
from tests.support.whole import every_second

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.norm, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))


Gradients = tuple[Tensor, ...]


def _twice(module: nn.Module, given: Gradients, _: Gradients) -> Gradients:
    return tuple(2 * gradient for gradient in given)


def _normalized(module: nn.Module, given: Gradients) -> Gradients:
    return tuple(gradient / (gradient.norm() + 1) for gradient in given)


def _noisy(module: nn.Module, given: Gradients, _: Gradients) -> Gradients:
    return tuple(gradient + 1e-3 * torch.randn_like(gradient) for gradient in given)


def _counting(module: Any, given: Gradients, _: Gradients) -> None:
    module.calls = getattr(module, "calls", 0) + 1


HOOKS: Mapping[str, Callable[[Net], object]] = {
    "of a layer": lambda net: net.b.register_full_backward_hook(_twice),
    "before a layer": lambda net: net.b.register_full_backward_pre_hook(_normalized),
    "both": lambda net: [HOOKS[name](net) for name in ("of a layer", "before a layer")],
    "before the model": lambda net: net.register_full_backward_pre_hook(_normalized),
    "of BatchNorm": lambda net: net.norm.register_full_backward_hook(_twice),
    "that draws": lambda net: net.b.register_full_backward_hook(_noisy),
    "of old": lambda net: net.norm.register_backward_hook(lambda module, given, _: None),
    "that counts": lambda net: net.b.register_full_backward_hook(_counting),
}


def _eager(net: nn.Module, hook: Callable[[Any], object] = lambda net: None) -> list[float]:
    hook(net)
    seeds = [derive(0, 0, step, 0, Stream.GRAPH) for step in range(STEPS)]
    return eager(net, sgd(net), [SMALL] * STEPS, before=lambda step: torch.manual_seed(seeds[step]))


def _check(model: nn.Module, other: nn.Module, losses: list[float], folder: Path) -> None:
    pef = compiled(folder, model, SMALL, loss="cross_entropy", optimizer=sgd(model))
    run = trained(pef, SMALL, **IN_ORDER)
    assert run.losses == losses
    for name, value in other.state_dict().items():
        assert torch.equal(run.weights[name], value), name


@pytest.mark.parametrize("name", every_second(HOOKS))
def test_a_modules_hook_has_the_bits_of_eager_pytorch(name: str, tmp_path: Path) -> None:
    model, other = Net(), Net()
    losses = _eager(other, HOOKS[name])
    assert (losses == _eager(Net())) == (name in ("of old", "that counts"))
    HOOKS[name](model)
    _check(model, other, losses, tmp_path)


def test_what_a_hook_does_with_state_and_values_is_refused(tmp_path: Path) -> None:
    def warming(module: Any, given: Gradients, _: Gradients) -> Gradients:
        _counting(module, given, _)
        return (given[0] * module.calls,)

    def asking(module: nn.Module, given: Gradients, _: Gradients) -> Gradients | None:
        return (2 * given[0],) if given[0].norm() > 1e3 else None

    for hook in (warming, asking):
        model = Net()
        model.b.register_full_backward_hook(hook)
        with pytest.raises(CaptureError):
            compiled(tmp_path, model, SMALL, loss="cross_entropy")


def test_a_hook_is_called_in_a_narrow_type_too(tmp_path: Path) -> None:
    model = Net()
    HOOKS["of a layer"](model)
    checked = compiled(tmp_path, model, SMALL, loss="cross_entropy", dtype="bf16").checked
    assert checked is not None
    assert checked.rounded == 0


def test_a_parameters_hook_is_refused_with_what_does_the_same(tmp_path: Path) -> None:
    def hook(weight: Any) -> None:
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    class Viewing(Net):
        """What the refusal asks for."""

        def forward(self, x: Tensor) -> Tensor:
            weight = self.b.weight.view_as(self.b.weight)
            if weight.requires_grad and torch.is_grad_enabled():
                hook(weight)
            hidden = functional.linear(torch.tanh(self.a(x)), weight, self.b.bias)
            return self.c(torch.tanh(self.norm(hidden)))

    model, other = Net(), Net()
    hook(model.b.weight)
    says = r"the parameter b.weight has a gradient hook.*w = self.weight.view_as\(self.weight\)"
    with pytest.raises(ModelError, match=f"(?s){says}"):
        compiled(tmp_path, model, SMALL, loss="cross_entropy")
    losses = _eager(other, lambda net: hook(net.b.weight))
    assert losses != _eager(Net())
    _check(Viewing(), other, losses, tmp_path)
