"""What a user hands over beside the model: losses (modules, results with a field `loss`, micro-batches that change a
mean) and optimizers, with hooks, of their own kinds and with schedulers."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from tests.state.case import EQUAL, RATE, REFUSED, TOLD, Outputs, Setup, add, cases, made, net_of, setups, with_loss


def _hooked(register: Callable[[Any], object]) -> Setup:
    register(loss := nn.MSELoss())
    return with_loss(loss)


class Scaled(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 3


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


def _inside(loss: nn.Module) -> Setup:
    """The remedy: the loss is a submodule."""
    return made(lambda net, x, y: net.criterion(net.model(x), y), model=Outputs, criterion=lambda: loss)


Result, Nameless = make_dataclass("Result", ["kl", "loss"]), make_dataclass("Nameless", ["kl", "reconstruction"])
Tupled, Wide = namedtuple("Tupled", ["kl", "loss"]), make_dataclass("Wide", ["logits", "parts", "loss"])


def returns(make: Callable[[Tensor, Tensor], Any]) -> Setup:
    """Two losses, in what `make` makes of the smaller one, `kl`, and the one to train."""

    def forward(net: Any, x: Tensor, y: Tensor) -> Any:
        h = net.a(x)
        return make(h.square().mean() * 0.1, functional.mse_loss(net.b(h).squeeze(1), y))

    return made(forward, a=lambda: nn.Linear(3, 4), b=lambda: nn.Linear(4, 1))


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


def _stack(norm: bool) -> nn.Module:
    """Layers in a row, which a pipeline can cut."""
    middle = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _in_micro_batches(loss: Callable[[Tensor, Tensor], Tensor], norm: bool = False) -> Setup:
    setup = made(lambda net, x, y: loss(net.layers(x).squeeze(1), y), layers=lambda: _stack(norm))
    setup.options = {"pipeline_stages": 2, "micro_batches": 2}
    return setup


def _contrastive(result: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(result[:, None] * target[None], torch.arange(len(result)))


def _padded(result: Tensor, target: Tensor) -> Tensor:
    counted = (target > 0).float()
    return ((result - target).square() * counted).sum() / counted.sum().clamp(min=1)


MICRO: Mapping[str, Any] = {"notice": "the mean over its", "steps": 2, "where": None}
setups(TOLD | REFUSED, **MICRO, whole=True)(
    micro_batches_with_a_sum=lambda: _in_micro_batches(lambda result, target: (result - target).square().sum()),
    micro_batches_with_a_contrastive_loss=lambda: _in_micro_batches(_contrastive),
    micro_batches_with_a_mean_of_tokens=lambda: _in_micro_batches(_padded),
)


def plain() -> Setup:
    return net_of(lambda net, h: h.tanh(), steps=6)


def _with_optimizer(make: Callable[[Any], Optimizer], attach: Callable[[Optimizer], object] | None = None) -> Setup:
    setup = plain()
    setup.optimizer = make(setup.model.parameters())
    if attach is not None:
        attached = attach(setup.optimizer)
        setup.scheduler = attached if isinstance(attached, lr_scheduler.LRScheduler) else None
    return setup


def _sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def _halves_gradients(optimizer: Optimizer, *others: object) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = one.grad * 0.5


def _shrinks(optimizer: Optimizer, *others: object) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.mul_(0.9)


class AdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad.sign(), alpha=0.01)


class SGD(torch.optim.SGD):
    """Another step by its own method."""

    def step(self, closure: Any = None) -> Any:
        _halves_gradients(self)
        return super().step(closure)


class Named(torch.optim.SGD): ...


def _scheduled(make: Callable[[Optimizer], object], **schedule: Any) -> Mapping[str, Any]:
    """A scheduler of torch, and the same as a table if a PEF has one."""

    def told() -> Setup:
        setup = plain()
        setup.options = {"set": {f"training.schedule.{name}": value for name, value in schedule.items()}}
        return setup

    says = ("training.schedule",) if schedule else ("OneCycleLR",)
    return {"build": lambda: _with_optimizer(_sgd, make), "rewritten": told if schedule else None, "says": says}


_SCHEDULERS = {
    "linear": _scheduled(lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 3), name="constant", warmup_steps=4),
    "step": _scheduled(lambda o: lr_scheduler.StepLR(o, 2, 0.5), name="step", step_size=2, gamma=0.5),
    "cosine": _scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 6), name="cosine", total_steps=6),
    "lambda": _scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda s: 1 - s / 8), name="linear", total_steps=8),
    "cycle": _scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.5, 6)),
}
_ROUNDED: dict[str, Any] = {"steps": 6, "tolerance": 1e-6}  # chainable schedulers of torch multiply rates by ratios
for _name, _case in _SCHEDULERS.items():
    _more = {**_ROUNDED, **_case, "where": None, "whole": _name != "linear"}
    add(f"scheduler_{_name}", __name__, expected=REFUSED, **_more)


cases(__name__)("""
from torch.utils.checkpoint import checkpoint_sequential
built loss_module_with_a_forward_hook: EQUAL
    return _hooked(lambda loss: loss.register_forward_hook(lambda module, given, result: result * 3))
built loss_module_whose_forward_is_replaced: EQUAL | REFUSED, where=None, whole=True
    def replace(loss):
        loss.forward = lambda result, target: 3 * functional.mse_loss(result, target)
    return _hooked(replace)
built loss_module_with_a_backward_hook: EQUAL | REFUSED, where=None, whole=True
    return _hooked(lambda loss: loss.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 3,)))
built loss_module_with_a_buffer: EITHER, says=("submodule",), where=None
    return with_loss(Moving())
rebuilt:
    return _inside(Moving())
built loss_module_with_a_parameter: EITHER, says=("submodule",), where=None, whole=True
    setup = with_loss(loss := Moving(has_parameter=True))
    setup.optimizer = torch.optim.SGD([*setup.model.parameters(), *loss.parameters()], lr=RATE)
    return setup
rebuilt:
    return _inside(Moving(has_parameter=True))

# The field called loss.
built two_losses_in_a_tuple: REFUSED, where=None, says=("loss",)
    return returns(lambda kl, loss: (kl, loss))
rebuilt:
    return returns(lambda kl, loss: {"loss": kl, "other": loss.detach()})
built three_losses_in_a_list: REFUSED, where=None, whole=True
    return returns(lambda kl, loss: [kl + loss, kl, loss])
built two_losses_in_a_dataclass_without_the_name: REFUSED, where=None, whole=True, oracle=lambda: returns(min)
    return returns(Nameless)

# Micro-batches: the mean over them is another loss.
built micro_batches_with_batch_norm: TOLD | REFUSED, **MICRO
    return _in_micro_batches(functional.mse_loss, norm=True)
built micro_batches_with_a_mean: EQUAL, steps=2, tolerance=1e-5, whole=True
    return _in_micro_batches(functional.mse_loss)
built checkpoint_sequential_with_batch_norm: EQUAL | TOLD | REFUSED, notice="checkpoint", where=None, whole=True
    def forward(net, x, y):
        result = checkpoint_sequential(net.layers, 2, x, use_reentrant=False)
        return functional.mse_loss(result.squeeze(1), y)
    return made(forward, layers=lambda: _stack(norm=True))

# Optimizers.
built hook_before_a_step: REFUSED, where=None, says=("hook", "_halves_gradients")
    return _with_optimizer(_sgd, lambda optimizer: optimizer.register_step_pre_hook(_halves_gradients))
built hook_after_a_step: REFUSED, where=None, says=("hook", "_shrinks"), whole=True
    return _with_optimizer(_sgd, lambda optimizer: optimizer.register_step_post_hook(_shrinks))
built step_of_the_instance: REFUSED, where=None, whole=True
    def attach(optimizer):
        step = optimizer.step
        def halved(closure= None):
            _halves_gradients(optimizer)
            return step(closure)
        optimizer.step = halved
    return _with_optimizer(_sgd, attach)
built subclass_called_adamw: REFUSED, where=None, says=("AdamW.step",)
    return _with_optimizer(lambda parameters: AdamW(parameters, lr=1e-3))
built subclass_called_sgd: REFUSED, where=None, says=("SGD.step",), whole=True
    return _with_optimizer(lambda parameters: SGD(parameters, lr=RATE))
built subclass_without_a_step: EQUAL, whole=True
    return _with_optimizer(lambda parameters: Named(parameters, lr=RATE))
built momentum_of_earlier_steps: EQUAL | TOLD | REFUSED, where=None, notice="states", whole=True
    setup = _with_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9))
    setup.model(*(tensor[:BATCH] for tensor in setup.data)).backward()
    setup.optimizer.step()
    return setup
""")
