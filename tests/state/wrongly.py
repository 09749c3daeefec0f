"""What was refused although it can be captured; what compiled and could not train; and what trains by another mean: in
micro-batches."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.state.case import Setup, cases, given, made

WITHOUT_MOMENTUM = given(norm=lambda: nn.BatchNorm1d(4, momentum=None))


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


def _in_micro_batches(loss: Callable[[Tensor, Tensor], Tensor], norm: bool = False) -> Setup:
    """Layers in a row, which a pipeline can cut."""

    def layers() -> nn.Module:
        middle = [nn.BatchNorm1d(4)] if norm else []
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    setup = made(lambda net, x, y: loss(net.layers(x).squeeze(1), y), layers=layers)
    setup.options = {"pipeline_stages": 2, "micro_batches": 2}
    return setup


MICRO: dict[str, Any] = {"notice": "the mean over its", "steps": 2, "where": None}


cases(__name__)("""
from sambasim.compiler.capture import asked_values
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.distributions import Normal

# Checks of values in code of torch.
case distribution_that_validates: EQUAL, whole=True
    return h + Normal(h, h.square() + 1).log_prob(torch.zeros_like(h))
case covariance_with_weights_and_correlation: EQUAL, whole=True
    return h @ torch.cov(h.T, aweights=torch.tensor([1.0, 2.0, 1.0, 0.5])) + h @ torch.corrcoef(h.T)
case gaussian_likelihood: EQUAL, whole=True
    return h + functional.gaussian_nll_loss(h, torch.zeros_like(h), h.square() + 0.1)
case batch_norm_without_momentum: EQUAL | TOLD, WITHOUT_MOMENTUM, notice="by rounding: the buffer norm.running_"
    return net.norm(h)

# Evaluation of what differentiates in its forward.
built gradient_penalty: EQUAL
    def forward(model, x, y):
        x = x.clone().requires_grad_(True)
        u = model.net(x).squeeze(1)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return functional.mse_loss(u, y) + (slope.norm(dim=1) - 1).square().mean(), u
    return made(forward, net=_network)
built derivative_as_the_output: EQUAL, whole=True
    def forward(model, x):
        x.requires_grad_(True)
        return torch.autograd.grad(model.net(x).sum(), x, create_graph=True)[0].sum(1)
    return made(forward, "mse", net=_network)
case both_kinds_of_checkpoint: EQUAL, given(layers=_layers), whole=True
    h = checkpoint(net.layers, h, use_reentrant=True)
    h = checkpoint_sequential(net.layers, 2, h, use_reentrant=False)
    h = checkpoint_sequential(net.layers, 2, h, use_reentrant=True)
    return checkpoint(torch.tanh, h, use_reentrant=False)
case order_in_an_integer_buffer: EQUAL, given(order=lambda: torch.tensor([2, 0, 1, 3])), whole=True
    return h[:, net.order.flip(0).tolist()]
case sizes_in_an_integer_buffer: EQUAL, given(sizes=lambda: torch.tensor([1, 3])), whole=True
    return torch.cat([part * 2 for part in h.split(net.sizes.tolist(), 1)], 1)
case gradient_of_an_activation_retained: EQUAL, whole=True
    v = h * 2
    if v.requires_grad:
        v.retain_grad()
    return v

# What compiled, and ended in the run.
built adaptive_softmax: EITHER, steps=6
    def forward(net, x, y):
        return net.softmax(net.layer(x), y).loss  # here
    softmax = lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [2, 6])  # of the last cluster, weights without elements
    setup = made(forward, layer=lambda: nn.Linear(3, 8), softmax=softmax)
    setup.data = (setup.data[0], torch.arange(len(setup.data[0])) * 7 % 10)
    return setup
case layers_dropped_by_a_draw: EITHER, given(layers=_layers), steps=10, whole=True
    for layer in net.layers:
        if not net.training or torch.zeros(1).uniform_(0, 1) < 0.5:  # here
            h = layer(h)
    return h
case branch_by_a_draw_in_place: EITHER, steps=10, whole=True
    p = torch.empty(()).bernoulli_(0.5)
    return h * 2 if p.item() else h  # here
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
