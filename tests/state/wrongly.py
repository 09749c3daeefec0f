"""What was refused although it can be captured, and what compiled and could not train."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta, Gamma, Normal
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from sambasim.compiler.capture import asked_values
from tests.state.case import (
    BATCH,
    EITHER,
    EQUAL,
    REFUSED,
    TOLD,
    Outputs,
    Setup,
    built,
    case,
    each,
    given,
    points,
    setups,
)

# Checks of values in code of torch.


each(EQUAL)(
    gaussian_likelihood=lambda net, h: h + functional.gaussian_nll_loss(h, torch.zeros_like(h), h.square() + 0.1)
)


@built(EQUAL, whole=True)
def gaussian_likelihood_as_the_loss() -> Setup:
    torch.manual_seed(0)
    gaussian = nn.GaussianNLLLoss()
    return Setup(Outputs(), points(), lambda result, target: gaussian(result, target, result.square() + 0.1))


ROUNDS = "by rounding: the buffer norm.running_"


each(EQUAL | TOLD, given(norm=lambda: nn.BatchNorm1d(4, momentum=None)), notice=ROUNDS, whole=True)(
    batch_norm_without_momentum=lambda net, h: net.norm(h)
)


each(EQUAL | TOLD, given(norm=lambda: nn.BatchNorm2d(1, momentum=None)), notice=ROUNDS, whole=True)(
    batch_norm_of_pictures_without_momentum=lambda net, h: net.norm(h.view(-1, 1, 2, 2)).reshape(h.shape)
)


# Static shapes.


ORTHOGONAL = given(layer=lambda: parametrizations.orthogonal(nn.Linear(4, 6)), back=lambda: nn.Linear(6, 4))


each(EQUAL | TOLD, ORTHOGONAL, notice="contiguously", whole=True)(
    orthogonal_weight=lambda net, h: net.back(net.layer(h))
)


each(EQUAL, whole=True)(
    covariance=lambda net, h: h @ torch.cov(h.T),
    correlation=lambda net, h: h @ torch.corrcoef(h.T),
    distribution_that_validates=lambda net, h: h + Normal(h, h.square() + 1).log_prob(torch.zeros_like(h)),
    covariance_with_weights=lambda net, h: h @ torch.cov(h.T, aweights=torch.tensor([1.0, 2.0, 1.0, 0.5])),
    draws_of_gamma=lambda net, h: h * Gamma(functional.softplus(h) + 0.5, torch.ones(4)).rsample(),
    draws_of_beta=lambda net, h: h * Beta(functional.softplus(h) + 0.5, torch.ones(4)).rsample(),
    choice_by_a_mask_of_bytes=lambda net, h: torch.where((h > 0).to(torch.uint8).bool(), h, h * 0.1),
    gradient_of_an_angle=lambda net, h: torch.complex(h, h.square() + 1).angle(),
)


# Evaluation of what differentiates in its forward.


class Physics(nn.Module):
    """A network whose derivative by its inputs is in the loss."""

    def __init__(self, residual: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.residual = residual

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_(True)
        u = self.net(x).squeeze(1)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return self.residual(u, slope, y), u


def _physics(residual: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Setup:
    torch.manual_seed(0)
    return Setup(Physics(residual), points())


@built(EQUAL)
def gradient_penalty() -> Setup:
    return _physics(lambda u, slope, y: functional.mse_loss(u, y) + (slope.norm(dim=1) - 1).square().mean())


setups(EQUAL, whole=True)(
    forces=lambda: _physics(lambda u, slope, y: (u - y).square().mean() + (-slope).square().mean()),
    residual_of_an_equation=lambda: _physics(lambda u, slope, y: (slope[:, 0] + slope[:, 1] * u - y).square().mean()),
)


class Energy(nn.Module):
    """Its outputs are derivatives, also in evaluation; the loss is a named one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0].sum(1)


@built(EQUAL, whole=True)
def derivative_as_the_output() -> Setup:
    torch.manual_seed(0)
    return Setup(Energy(), points(), "mse")


# Locks, checkpoints, integers, counters.


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @functools.cached_property
    def width(self) -> int:
        return self.layer.out_features

    @functools.cached_property
    def scale(self) -> float:
        return self.width**-0.5

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h) * self.scale


each(EQUAL, given(cached=Cached), whole=True)(cached_properties=lambda net, h: net.cached(h))


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


@case(EQUAL, given(layers=_layers), whole=True)
def both_kinds_of_checkpoint(net: Any, h: Tensor) -> Tensor:
    h = checkpoint(net.layers, h, use_reentrant=True)
    return checkpoint_sequential(net.layers, 2, h, use_reentrant=False)


@case(EQUAL, given(layers=_layers), whole=True)
def both_kinds_of_checkpoint_the_other_way_round(net: Any, h: Tensor) -> Tensor:
    h = checkpoint_sequential(net.layers, 2, h, use_reentrant=True)
    return checkpoint(torch.tanh, h, use_reentrant=False)


class Padded(nn.Module):
    """As EnCodec does: how much to pad is in integer buffers that never change."""

    stride: Tensor
    size: Tensor
    total: Tensor

    def __init__(self, stride: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, stride=stride)
        self.register_buffer("stride", torch.tensor(stride), persistent=False)
        self.register_buffer("size", torch.tensor(3, dtype=torch.int64), persistent=False)
        self.register_buffer("total", torch.tensor(3 - stride), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        frames = (h.shape[-1] - self.size + self.total) / self.stride + 1
        length = (torch.ceil(frames).to(torch.int64) - 1) * self.stride + self.size - self.total
        extra = int(length - h.shape[-1])
        right = int(self.total // 2)
        return self.conv(functional.pad(h.unsqueeze(1), (int(self.total) - right, right + extra))).flatten(1)


each(EQUAL, given(padded=Padded, back=lambda: nn.Linear(4, 4)), whole=True)(
    paddings_in_integer_buffers=lambda net, h: net.back(net.padded(h))
)


each(EQUAL, given(order=lambda: torch.tensor([2, 0, 1, 3])), whole=True)(
    order_in_an_integer_buffer=lambda net, h: h[:, net.order.tolist()]
)


each(EQUAL, given(sizes=lambda: torch.tensor([1, 3])), whole=True)(
    sizes_in_an_integer_buffer=lambda net, h: torch.cat([part * 2 for part in h.split(net.sizes.tolist(), 1)], 1)
)


@case(EQUAL, whole=True)
def gradient_of_an_activation_retained(net: Any, h: Tensor) -> Tensor:
    v = h * 2
    if v.requires_grad:
        v.retain_grad()
    return v


@case(EQUAL, given(kept=dict), whole=True)
def gradients_of_activations_retained_in_a_dict(net: Any, h: Tensor) -> Tensor:
    net.kept["h"] = v = h.tanh()
    if v.requires_grad:
        v.retain_grad()
    return v


@case(EQUAL, given(calls=0, total=0.0), whole=True)
def counters_of_several_kinds_that_nobody_reads(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    net.total = net.total + h.shape[0]
    return h


# What compiled, and ended in the run.


class Adaptive(nn.Module):
    def __init__(self, cutoffs: list[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 10, cutoffs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.softmax(self.layer(x), y).loss


def _adaptive(*cutoffs: int) -> Setup:
    torch.manual_seed(0)
    x, y = points(6)
    return Setup(Adaptive([*cutoffs]), (x, torch.arange(len(y)) * 7 % 10))


setups(EITHER, where="self.softmax(", steps=6)(adaptive_softmax=lambda: _adaptive(4))


setups(EITHER, where="self.softmax(", steps=6, whole=True)(adaptive_softmax_of_three_clusters=lambda: _adaptive(2, 6))


@case(EITHER, given(layers=_layers), steps=10, whole=True)
def layers_dropped_by_a_draw(net: Any, h: Tensor) -> Tensor:
    for layer in net.layers:
        if not net.training or torch.zeros(1).uniform_(0, 1) < 0.5:  # here
            h = layer(h)
    return h


@case(EITHER, given(layers=_layers), steps=10, whole=True)
def layers_dropped_by_a_list_of_draws(net: Any, h: Tensor) -> Tensor:
    keeps = torch.zeros(4).uniform_(0, 1) < 0.5
    for keep, layer in zip(keeps, net.layers, strict=True):
        h = layer(h) if keep or not net.training else h  # here
    return h


@case(EITHER, steps=10, whole=True)
def branch_by_a_draw_in_place(net: Any, h: Tensor) -> Tensor:
    p = torch.empty(()).bernoulli_(0.5)
    return h * 2 if p.item() else h  # here


@case(EITHER, steps=8, whole=True)
def cholesky_tried_with_more_and_more_jitter(net: Any, h: Tensor) -> Tensor:
    gram = (h @ h.T) * (1 - 2 * (h.detach().sum() > 0))
    for jitter in (0.0, 1.0, 100.0):
        try:
            return torch.linalg.cholesky(gram + jitter * torch.eye(BATCH)) @ h  # here
        except torch.linalg.LinAlgError:
            continue
    return h


@case(REFUSED, says=(asked_values._TRIED.rewrite,), steps=8)
def inverse_tried(net: Any, h: Tensor) -> Tensor:
    mask = (h.detach().sum() > 0).float()
    try:
        return h @ torch.linalg.inv(mask * torch.eye(4))  # here
    except torch.linalg.LinAlgError:
        return h


@inverse_tried.rewrite()
def inverse_chosen(net: Any, h: Tensor) -> Tensor:
    inverse, info = torch.linalg.inv_ex((h.detach().sum() > 0).float() * torch.eye(4))
    return h @ torch.where(info == 0, inverse, torch.eye(4))


@case(REFUSED, steps=8, whole=True)
def assertion_tried(net: Any, h: Tensor) -> Tensor:
    try:
        assert h.sum() > -100  # here
    except AssertionError:
        h = h * 2
    return h
