"""Losses that a user hands over: modules, results with a field `loss`, and micro-batches that change a mean."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

from tests.state.case import EITHER, EQUAL, RATE, REFUSED, TOLD, Net, Outputs, Setup, built, points, setups


def with_loss(loss: Any, target: Callable[[Tensor], Tensor] = lambda y: y) -> Setup:
    torch.manual_seed(0)
    x, y = points()
    return Setup(Outputs(), (x, target(y)), loss)


def _hooked(register: Callable[[Any], object], loss: nn.Module | None = None) -> Setup:
    made = loss or nn.MSELoss()
    register(made)
    return with_loss(made)


@built(EQUAL)
def loss_module_with_a_forward_hook() -> Setup:
    return _hooked(lambda loss: loss.register_forward_hook(lambda module, given, result: result * 3))


class Scaled(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 3


@built(EQUAL | REFUSED, where=None, whole=True)
def loss_module_whose_forward_is_replaced() -> Setup:
    def replace(loss: Any) -> None:
        loss.forward = lambda result, target: 3 * functional.mse_loss(result, target)

    return _hooked(replace)


@built(EQUAL | REFUSED, where=None, whole=True)
def loss_module_with_a_backward_hook() -> Setup:
    return _hooked(lambda loss: loss.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 3,)))


class Moving(nn.Module):
    """A loss with a buffer that it changes, and a parameter."""

    mean: Tensor

    def __init__(self, has_parameter: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(())) if has_parameter else 1.0

    def forward(self, result: Tensor, target: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(result.detach().mean(), alpha=0.1)  # here
        return functional.mse_loss(result - self.mean, target * self.scale)


class Inside(nn.Module):
    """The remedy: the loss is a submodule."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)


def _inside(loss: nn.Module) -> Setup:
    torch.manual_seed(0)
    return Setup(Inside(Outputs(), loss), points())


@built(EITHER, says=("submodule",), where=None)
def loss_module_with_a_buffer() -> Setup:
    return with_loss(Moving())


loss_module_with_a_buffer.rebuilt(lambda: _inside(Moving()))


@built(EITHER, says=("submodule",), where=None, whole=True)
def loss_module_with_a_parameter() -> Setup:
    setup = with_loss(loss := Moving(has_parameter=True))
    setup.optimizer = torch.optim.SGD([*setup.model.parameters(), *loss.parameters()], lr=RATE)
    return setup


loss_module_with_a_parameter.rebuilt(lambda: _inside(Moving(has_parameter=True)))


# The field called loss.


@dataclass
class Result:
    kl: Tensor
    loss: Tensor


class Tupled(NamedTuple):
    kl: Tensor
    loss: Tensor


@dataclass
class Wide:
    logits: Tensor
    parts: tuple[Tensor, ...]
    loss: Tensor


class Returns(Net):
    """Two losses, in what `make` makes of the smaller one, `kl`, and the one to train."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.a(x)
        return self.make(h.square().mean() * 0.1, functional.mse_loss(self.b(h).squeeze(1), y))


def returns(make: Callable[[Tensor, Tensor], Any]) -> Setup:
    torch.manual_seed(0)
    return Setup(Returns(make), points())


@built(REFUSED, where=None, says=("loss",))
def two_losses_in_a_tuple() -> Setup:
    return returns(lambda kl, loss: (kl, loss))


two_losses_in_a_tuple.rebuilt(lambda: returns(lambda kl, loss: {"loss": kl, "other": loss.detach()}))


setups(REFUSED, where=None, whole=True)(three_losses_in_a_list=lambda: returns(lambda kl, loss: [kl + loss, kl, loss]))


@dataclass
class Nameless:
    kl: Tensor
    reconstruction: Tensor


@built(REFUSED, where=None, whole=True, oracle=lambda: returns(lambda kl, loss: kl))
def two_losses_in_a_dataclass_without_the_name() -> Setup:
    return returns(Nameless)


setups(EQUAL, whole=True)(
    loss_module_with_a_forward_pre_hook=lambda: _hooked(
        lambda loss: loss.register_forward_pre_hook(lambda module, given: (given[0] * 2, given[1]))
    ),
    loss_of_a_subclass=lambda: with_loss(Scaled()),
    loss_in_a_dataclass=lambda: returns(Result),
    loss_in_a_named_tuple=lambda: returns(Tupled),
    loss_last_in_a_dataclass=lambda: returns(lambda kl, loss: Wide(kl.detach(), (kl,), loss)),
    loss_in_a_dictionary=lambda: returns(lambda kl, loss: {"kl": kl, "loss": loss}),
    loss_and_a_detached_number_in_a_tuple=lambda: returns(lambda kl, loss: (loss, kl.detach())),
)


# Micro-batches: the mean over them is another loss.


class Stack(nn.Module):
    """Layers in a row, which a pipeline can cut, and a loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(4)] if norm else []
        self.layers = nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layers(x).squeeze(1), y)


def _in_micro_batches(loss: Callable[[Tensor, Tensor], Tensor], norm: bool = False) -> Setup:
    torch.manual_seed(0)
    return Setup(Stack(loss, norm), points(), options={"pipeline_stages": 2, "micro_batches": 2})


def _contrastive(result: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(result[:, None] * target[None], torch.arange(len(result)))


def _padded(result: Tensor, target: Tensor) -> Tensor:
    counted = (target > 0).float()
    return ((result - target).square() * counted).sum() / counted.sum().clamp(min=1)


MICRO: Mapping[str, Any] = {"notice": "the mean over its", "steps": 2, "where": None}


setups(TOLD | REFUSED, **MICRO)(micro_batches_with_batch_norm=lambda: _in_micro_batches(functional.mse_loss, norm=True))


setups(TOLD | REFUSED, **MICRO, whole=True)(
    micro_batches_with_a_sum=lambda: _in_micro_batches(lambda result, target: (result - target).square().sum()),
    micro_batches_with_a_contrastive_loss=lambda: _in_micro_batches(_contrastive),
    micro_batches_with_a_mean_of_tokens=lambda: _in_micro_batches(_padded),
)


@built(EQUAL, steps=2, tolerance=1e-5, whole=True)
def micro_batches_with_a_mean() -> Setup:
    return _in_micro_batches(functional.mse_loss)


class Checkpointed(Stack):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
        return self.loss(result.squeeze(1), y)


@built(EQUAL | TOLD | REFUSED, notice="checkpoint", where=None, whole=True)
def checkpoint_sequential_with_batch_norm() -> Setup:
    torch.manual_seed(0)
    return Setup(Checkpointed(functional.mse_loss, norm=True), points())
