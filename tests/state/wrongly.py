"""What was refused although it can be captured; what compiled and could not train; and what trains by another mean: in
micro-batches."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.state.case import Setup, cases, given, made

ROUNDS: dict[str, Any] = {"notice": "by rounding: the buffer norm.running_", "whole": True}
WITHOUT_MOMENTUM = given(norm=lambda: nn.BatchNorm1d(4, momentum=None))
PICTURES = given(norm=lambda: nn.BatchNorm2d(1, momentum=None))
ORTHOGONAL = given(layer=lambda: parametrizations.orthogonal(nn.Linear(4, 6)), back=lambda: nn.Linear(6, 4))


def _physics(residual: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Setup:
    """A network whose derivative by its inputs is in the loss."""

    def forward(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_(True)
        u = model.net(x).squeeze(1)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return residual(u, slope, y), u

    return made(forward, net=_network)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


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


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


class Padded(nn.Module):
    """As EnCodec does: how much to pad is in integer buffers that never change."""

    stride: Tensor
    size: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, stride=2)
        for name, value in {"stride": 2, "size": 3, "total": 1}.items():
            self.register_buffer(name, torch.tensor(value), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        frames = (h.shape[-1] - self.size + self.total) / self.stride + 1
        length = (torch.ceil(frames).to(torch.int64) - 1) * self.stride + self.size - self.total
        extra = int(length - h.shape[-1])
        right = int(self.total // 2)
        return self.conv(functional.pad(h.unsqueeze(1), (int(self.total) - right, right + extra))).flatten(1)


def _adaptive(*cutoffs: int) -> Setup:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.softmax(net.layer(x), y).loss

    softmax = partial(nn.AdaptiveLogSoftmaxWithLoss, 8, 10, [*cutoffs])
    setup = made(forward, layer=lambda: nn.Linear(3, 8), softmax=softmax)
    setup.data = (setup.data[0], torch.arange(len(setup.data[0])) * 7 % 10)
    return setup


def _in_micro_batches(loss: Callable[[Tensor, Tensor], Tensor], norm: bool = False) -> Setup:
    """Layers in a row, which a pipeline can cut."""

    def layers() -> nn.Module:
        middle = [nn.BatchNorm1d(4)] if norm else []
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    setup = made(lambda net, x, y: loss(net.layers(x).squeeze(1), y), layers=layers)
    setup.options = {"pipeline_stages": 2, "micro_batches": 2}
    return setup


def _contrastive(result: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(result[:, None] * target[None], torch.arange(len(result)))


def _padded(result: Tensor, target: Tensor) -> Tensor:
    counted = (target > 0).float()
    return ((result - target).square() * counted).sum() / counted.sum().clamp(min=1)


MICRO: dict[str, Any] = {"notice": "the mean over its", "steps": 2, "where": None}


cases(__name__)("""
from sambasim.compiler.capture import asked_values
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.distributions import Beta, Gamma, Normal

# Checks of values in code of torch.
case covariance: EQUAL, whole=True
    return h @ torch.cov(h.T)
case correlation: EQUAL, whole=True
    return h @ torch.corrcoef(h.T)
case distribution_that_validates: EQUAL, whole=True
    return h + Normal(h, h.square() + 1).log_prob(torch.zeros_like(h))
case covariance_with_weights: EQUAL, whole=True
    return h @ torch.cov(h.T, aweights=torch.tensor([1.0, 2.0, 1.0, 0.5]))
case draws_of_gamma: EQUAL, whole=True
    return h * Gamma(functional.softplus(h) + 0.5, torch.ones(4)).rsample()
case draws_of_beta: EQUAL, whole=True
    return h * Beta(functional.softplus(h) + 0.5, torch.ones(4)).rsample()
case choice_by_a_mask_of_bytes: EQUAL, whole=True
    return torch.where((h > 0).to(torch.uint8).bool(), h, h * 0.1)
case gradient_of_an_angle: EQUAL, whole=True
    return torch.complex(h, h.square() + 1).angle()
case gaussian_likelihood: EQUAL
    return h + functional.gaussian_nll_loss(h, torch.zeros_like(h), h.square() + 0.1)
built gaussian_likelihood_as_the_loss: EQUAL, whole=True
    torch.manual_seed(0)
    gaussian = nn.GaussianNLLLoss()
    return Setup(Outputs(), points(), lambda result, target: gaussian(result, target, result.square() + 0.1))
case batch_norm_without_momentum: EQUAL | TOLD, WITHOUT_MOMENTUM, **ROUNDS
    return net.norm(h)
case batch_norm_of_pictures_without_momentum: EQUAL | TOLD, PICTURES, **ROUNDS
    return net.norm(h.view(-1, 1, 2, 2)).reshape(h.shape)

# Static shapes.
case orthogonal_weight: EQUAL | TOLD, ORTHOGONAL, notice="contiguously", whole=True
    return net.back(net.layer(h))

# Evaluation of what differentiates in its forward.
built forces: EQUAL, whole=True
    return _physics(lambda u, slope, y: (u - y).square().mean() + (-slope).square().mean())
built residual_of_an_equation: EQUAL, whole=True
    return _physics(lambda u, slope, y: (slope[:, 0] + slope[:, 1] * u - y).square().mean())
built gradient_penalty: EQUAL
    return _physics(lambda u, slope, y: functional.mse_loss(u, y) + (slope.norm(dim=1) - 1).square().mean())
built derivative_as_the_output: EQUAL
    def forward(model, x):
        x.requires_grad_(True)
        return torch.autograd.grad(model.net(x).sum(), x, create_graph=True)[0].sum(1)
    return made(forward, "mse", net=_network)
case cached_properties: EQUAL, given(cached=Cached), whole=True
    return net.cached(h)
case both_kinds_of_checkpoint: EQUAL, given(layers=_layers), whole=True
    h = checkpoint(net.layers, h, use_reentrant=True)
    return checkpoint_sequential(net.layers, 2, h, use_reentrant=False)
case both_kinds_of_checkpoint_the_other_way_round: EQUAL, given(layers=_layers), whole=True
    h = checkpoint_sequential(net.layers, 2, h, use_reentrant=True)
    return checkpoint(torch.tanh, h, use_reentrant=False)
case paddings_in_integer_buffers: EQUAL, given(padded=Padded, back=lambda: nn.Linear(4, 4)), whole=True
    return net.back(net.padded(h))
case order_in_an_integer_buffer: EQUAL, given(order=lambda: torch.tensor([2, 0, 1, 3])), whole=True
    return h[:, net.order.tolist()]
case sizes_in_an_integer_buffer: EQUAL, given(sizes=lambda: torch.tensor([1, 3])), whole=True
    return torch.cat([part * 2 for part in h.split(net.sizes.tolist(), 1)], 1)
case gradient_of_an_activation_retained: EQUAL, whole=True
    v = h * 2
    if v.requires_grad:
        v.retain_grad()
    return v

# What compiled, and ended in the run.
built adaptive_softmax: EITHER, where="net.softmax(", steps=6
    return _adaptive(4)
built adaptive_softmax_of_three_clusters: EITHER, where="net.softmax(", steps=6, whole=True
    return _adaptive(2, 6)
case layers_dropped_by_a_draw: EITHER, given(layers=_layers), steps=10, whole=True
    for layer in net.layers:
        if not net.training or torch.zeros(1).uniform_(0, 1) < 0.5:  # here
            h = layer(h)
    return h
case layers_dropped_by_a_list_of_draws: EITHER, given(layers=_layers), steps=10, whole=True
    keeps = torch.zeros(4).uniform_(0, 1) < 0.5
    for keep, layer in zip(keeps, net.layers, strict=True):
        h = layer(h) if keep or not net.training else h  # here
    return h
case branch_by_a_draw_in_place: EITHER, steps=10, whole=True
    p = torch.empty(()).bernoulli_(0.5)
    return h * 2 if p.item() else h  # here
case cholesky_tried_with_more_and_more_jitter: EITHER, steps=8, whole=True
    gram = (h @ h.T) * (1 - 2 * (h.detach().sum() > 0))
    for jitter in (0.0, 1.0, 100.0):
        try:
            return torch.linalg.cholesky(gram + jitter * torch.eye(BATCH)) @ h  # here
        except torch.linalg.LinAlgError:
            continue
case inverse_tried: REFUSED, says=(asked_values._TRIED.rewrite,), steps=8
    mask = (h.detach().sum() > 0).float()
    try:
        return h @ torch.linalg.inv(mask * torch.eye(4))  # here
    except torch.linalg.LinAlgError:
        return h
rewrite inverse_chosen:
    inverse, info = torch.linalg.inv_ex((h.detach().sum() > 0).float() * torch.eye(4))
    return h @ torch.where(info == 0, inverse, torch.eye(4))
case assertion_tried: REFUSED, steps=8, whole=True
    try:
        assert h.sum() > -100  # here
    except AssertionError:
        h = h * 2
    return h

# Micro-batches.
built micro_batches_with_a_sum: TOLD | REFUSED, **MICRO, whole=True
    return _in_micro_batches(lambda result, target: (result - target).square().sum())
built micro_batches_with_a_contrastive_loss: TOLD | REFUSED, **MICRO, whole=True
    return _in_micro_batches(_contrastive)
built micro_batches_with_a_mean_of_tokens: TOLD | REFUSED, **MICRO, whole=True
    return _in_micro_batches(_padded)
built micro_batches_with_batch_norm: TOLD | REFUSED, **MICRO
    return _in_micro_batches(functional.mse_loss, norm=True)
built micro_batches_with_a_mean: EQUAL, steps=2, tolerance=1e-5, whole=True
    return _in_micro_batches(functional.mse_loss)
built momentum_of_earlier_steps: EQUAL | TOLD | REFUSED, where=None, notice="states", whole=True
    setup = net_of(lambda net, h: h.tanh())
    setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=RATE, momentum=0.9)
    setup.model(*(tensor[:BATCH] for tensor in setup.data)).backward()
    setup.optimizer.step()
    return setup
""")
