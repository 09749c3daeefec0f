"""Refusals that name what a model reads or changes, though it is no slot of Python: gradients of the last step, what a
backward changes, memory that two have, weights that are trained and changed, and losses with a state."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sambasim.compiler.capture import explain, trial
from tests.state.case import REFUSED, Outputs, Setup, built, case, each, given, points, zero
from tests.state.losses import with_loss


@case(REFUSED, says=(trial._GRAD.rewrite,))
def gradient_of_the_last_step(net: Any, h: Tensor) -> Tensor:
    last = net.b.weight.grad  # here
    return h if last is None else h / (1 + last.norm())


gradient_of_the_last_step.rewrite()(lambda net, h: h)


@case(REFUSED, given(steps=zero), says=(explain._TWICE.rewrite,), own_losses=True)
def count_in_a_checkpoint(net: Any, h: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        net.steps.add_(1)  # here
        return x.tanh()

    return checkpoint(block, h, use_reentrant=False) * torch.where(net.steps < 3, 1.0, 0.5)


@count_in_a_checkpoint.rewrite(given(steps=zero))
def count_without_a_checkpoint(net: Any, h: Tensor) -> Tensor:
    net.steps.add_(1)
    return h.tanh() * torch.where(net.steps < 3, 1.0, 0.5)


each(REFUSED, given(norm=lambda: nn.BatchNorm1d(4)), says=("torch.utils.checkpoint",), own_losses=True)(
    batch_norm_in_a_checkpoint=lambda net, h: (
        checkpoint(lambda x: net.norm(x), h, use_reentrant=False) - net.norm.running_mean  # here
    )
).rewrite(given(norm=lambda: nn.BatchNorm1d(4)))(lambda net, h: net.norm(h) - net.norm.running_mean.clone())


@case(REFUSED, given(norm=lambda: torch.ones(())), says=(explain._LATE.rewrite,), own_losses=True)
def norm_that_a_hook_keeps(net: Any, h: Tensor) -> Tensor:
    def hook(g: Tensor) -> Tensor:
        net.norm.mul_(0.9).add_(g.detach().norm(), alpha=0.1)  # here
        return g / net.norm

    if h.requires_grad:
        h.register_hook(hook)
    return h * 1.5


@norm_that_a_hook_keeps.rewrite()
def norm_of_this_gradient(net: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g / (1 + g.norm()))
    return h * 1.5


# Memory that two have.


def _views(net: Any) -> None:
    net.register_buffer("rows", torch.zeros(2, 4))
    net.register_buffer("first", net.rows[0])


@case(REFUSED, _views, says=("the buffer rows and the buffer first are", "take the part of it"), where=None)
def buffer_that_is_a_row_of_another(net: Any, h: Tensor) -> Tensor:
    before = net.first.clone()
    net.rows.mul_(0.5).add_(h.detach().mean(0))
    return h - before


@buffer_that_is_a_row_of_another.rewrite(given(rows=lambda: torch.zeros(2, 4)))
def row_of_a_buffer(net: Any, h: Tensor) -> Tensor:
    before = net.rows[0].clone()
    net.rows.mul_(0.5).add_(h.detach().mean(0))
    return h - before


def _array(net: Any) -> None:
    net.register_buffer("n", torch.zeros(1))
    net.array = net.n.numpy()


@case(REFUSED, _array, says=("the memory of the buffer n as an array of NumPy", "self.n.add_(1)"))
def buffer_that_numpy_counts(net: Any, h: Tensor) -> Tensor:
    net.array += 1  # here
    return h * torch.where(net.n[0] < 3, 1.0, 0.5)


@buffer_that_numpy_counts.rewrite(given(n=lambda: torch.zeros(1)))
def buffer_that_pytorch_counts(net: Any, h: Tensor) -> Tensor:
    net.n.add_(1)
    return h * torch.where(net.n[0] < 3, 1.0, 0.5)


# What no buffer is, and changes what later calls compute.


@case(REFUSED, given(seen=lambda: []), says=(explain.REWRITES["content"],))
def length_of_a_list(net: Any, h: Tensor) -> Tensor:
    net.seen.append(1)  # here
    return h * (1.0 if len(net.seen) < 3 else 0.5)


@length_of_a_list.rewrite(given(steps=zero))
def count_in_place_of_a_length(net: Any, h: Tensor) -> Tensor:
    net.steps.add_(1)
    return h * torch.where(net.steps < 3, 1.0, 0.5)


def _layer(frozen: bool) -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(not frozen)


@case(REFUSED, given(n=0, c=lambda: _layer(frozen=True)), says=(explain.REWRITES["gradient"], "requires_grad"))
def layer_trained_from_a_step_on(net: Any, h: Tensor) -> Tensor:
    net.n += 1
    if net.n == 3:
        net.c.requires_grad_(True)  # here
    return net.c(h)


@layer_trained_from_a_step_on.rewrite(given(steps=zero, c=lambda: _layer(frozen=False)))
def weights_chosen_by_a_count(net: Any, h: Tensor) -> Tensor:
    net.steps.add_(1)
    weight, bias = (torch.where(net.steps < 3, one.detach(), one) for one in (net.c.weight, net.c.bias))
    return functional.linear(h, weight, bias)


@case(REFUSED, given(first=threading.Event), says=("model.first._flag",))
def first_call_by_an_event(net: Any, h: Tensor) -> Tensor:
    if not net.first.is_set():
        net.first.set()  # here
        return h * 0.1
    return h


@first_call_by_an_event.rewrite(given(steps=zero))
def first_call_by_a_count(net: Any, h: Tensor) -> Tensor:
    net.steps.add_(1)
    return torch.where(net.steps < 2, h * 0.1, h)


def _half(net: Any, h: Tensor) -> Tensor:
    return h * 0.5


def _whole(net: Any, h: Tensor) -> Tensor:
    net.act = net.then_half
    return h


def _methods(net: Any) -> None:
    net.then_half = _half.__get__(net)
    net.act = _whole.__get__(net)


@case(REFUSED, _methods, says=("model.act, ",), where="net.act = net.then_half")
def method_that_replaces_itself(net: Any, h: Tensor) -> Tensor:
    return net.act(h)


@method_that_replaces_itself.rewrite(given(steps=zero))
def method_chosen_by_a_count(net: Any, h: Tensor) -> Tensor:
    net.steps.add_(1)
    return torch.where(net.steps < 2, h, h * 0.5)


@case(REFUSED, says=(explain.MADE.rewrite, explain.MADE.what))
def generator_made_in_forward(net: Any, h: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(3)
    return h + torch.randn(4, generator=own)  # here


def _with_draws(net: Any) -> None:
    net.register_buffer("noise", torch.randn(4, generator=torch.Generator().manual_seed(3)))


generator_made_in_forward.rewrite(_with_draws)(lambda net, h: h + net.noise)


class Trainer:
    """One for all models, which the first call makes."""

    made: "Trainer | None" = None

    def __init__(self) -> None:
        self.steps = 0

    @classmethod
    def of_process(cls) -> "Trainer":
        cls.made = cls.made or cls()
        return cls.made


@case(REFUSED, says=("Trainer.made.steps, ",))
def count_of_an_object_that_the_first_call_makes(net: Any, h: Tensor) -> Tensor:
    trainer = Trainer.of_process()
    trainer.steps += 1  # here
    return h * (1.0 if trainer.steps < 3 else 0.5)


count_of_an_object_that_the_first_call_makes.rewrite(given(steps=zero))(count_in_place_of_a_length)


# Weights that are trained, and changed in forward.


@case(REFUSED, says=(explain._PARAMETER.rewrite,), own_losses=True)
def weight_clamped_in_forward(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.b.weight.clamp_(-0.25, 0.25)  # here
    return h


weight_clamped_in_forward.rewrite()(lambda net, h: h + functional.linear(h, net.b.weight.clamp(-0.25, 0.25)))


@case(REFUSED, says=("w = F.normalize(self.a.weight)", "trains other numbers"), own_losses=True)
def weight_replaced_in_forward(net: Any, h: Tensor) -> Tensor:
    net.b.weight.data = functional.normalize(net.b.weight.data)  # here
    return h


weight_replaced_in_forward.rewrite()(
    lambda net, h: h + functional.linear(h, functional.normalize(net.b.weight), net.b.bias)
)


# Losses with a state.


class Normed:
    """The loss over its first value."""

    first: Tensor | None = None

    def __call__(self, result: Tensor, target: Tensor) -> Tensor:
        value = functional.mse_loss(result, target)
        if self.first is None:
            self.first = value.detach()  # here
        return value / self.first


class Buffered(nn.Module):
    value: Tensor
    is_set: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = Outputs()
        self.register_buffer("value", zero())
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(self.model(x), target)
        self.value.copy_(torch.where(self.is_set, self.value, loss.detach()))
        self.is_set.fill_(True)
        return loss / self.value.clone()


@built(REFUSED, says=("loss.first, ", f"{explain.INTO_MODEL} {explain.FIRST_CALL}"))
def loss_over_its_first_value() -> Setup:
    return with_loss(Normed())


@loss_over_its_first_value.rebuilt
def loss_within_the_model() -> Setup:
    torch.manual_seed(0)
    return Setup(Buffered(), points())
