"""Refusals that name what a model reads or changes, though it is no slot of Python: gradients of the last step, what a
backward changes, memory that two have, weights that are trained and changed, and losses with a state."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sambasim.compiler import explain, lost
from tests.state.case import REFUSED, case, given, zero


@case(REFUSED, says=(lost._GRAD.rewrite,))
def gradient_of_the_last_step(net: Any, h: Tensor) -> Tensor:
    last = net.b.weight.grad  # here
    return h if last is None else h / (1 + last.norm())


gradient_of_the_last_step.rewrite()(lambda net, h: h)


@case(REFUSED, given(steps=zero), says=(explain._TWICE.rewrite.split(";")[0],), own_losses=True)
def count_in_a_checkpoint(net: Any, h: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        net.steps.add_(1)  # here
        return x.tanh()

    return checkpoint(block, h, use_reentrant=False) * torch.where(net.steps < 3, 1.0, 0.5)


@count_in_a_checkpoint.rewrite(given(steps=zero))
def count_without_a_checkpoint(net: Any, h: Tensor) -> Tensor:
    net.steps.add_(1)
    return h.tanh() * torch.where(net.steps < 3, 1.0, 0.5)


@case(REFUSED, given(norm=lambda: nn.BatchNorm1d(4)), says=("torch.utils.checkpoint",), own_losses=True)
def batch_norm_in_a_checkpoint(net: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda x: net.norm(x), h, use_reentrant=False) - net.norm.running_mean  # here


batch_norm_in_a_checkpoint.rewrite(given(norm=lambda: nn.BatchNorm1d(4)))(
    lambda net, h: net.norm(h) - net.norm.running_mean.clone()
)


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
