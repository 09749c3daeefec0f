"""Messages: each obstacle has its line and the remedy that fits it, and the remedy, applied, is equal."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm

from sambasim.compiler.capture import explain
from tests.state.case import EITHER, EQUAL, REFUSED, Setup, built, case, each, given, points
from tests.state.losses import with_loss

# Labels that the loss does not take. Eager PyTorch raises too: what is run is the remedy.


def labels(change: Callable[[Tensor], Tensor] = lambda y: y, loss: Any = "cross_entropy") -> Setup:
    """Five classes."""
    torch.manual_seed(0)
    x, y = points()
    model = nn.Sequential(nn.Linear(3, 5), *([nn.LogSoftmax(1)] if loss == "nll" else []))
    return Setup(model, (x, change(-torch.arange(len(y)) % 5)), loss)


LABELS: dict[str, tuple[Callable[[Tensor], Tensor], str, tuple[str, ...], bool]] = {
    "labels_of_int32": (lambda y: y.int(), "cross_entropy", ("int32", ".long()"), False),
    "labels_that_are_bool": (lambda y: y > 2, "cross_entropy", ("bool", ".long()"), True),
    "labels_from_one_on": (lambda y: y + 1, "cross_entropy", ("5 classes",), True),
    "labels_of_int8_for_nll": (lambda y: y.to(torch.int8), "nll", ("int8", ".long()"), True),
    "labels_below_zero": (lambda y: y - 1, "cross_entropy", ("-1", "5 classes"), True),
    "labels_of_int16": (lambda y: y.short(), "cross_entropy", ("int16", ".long()"), True),
    "labels_that_are_bool_for_a_binary_loss": (lambda y: y[:, None] > 2, "bce_with_logits", (".float()",), True),
}
for _name, (_change, _loss, _says, _whole) in LABELS.items():
    _binary = _loss == "bce_with_logits"
    _remedy = (lambda y: (y[:, None] > torch.arange(5)).float()) if _binary else (lambda y: y)
    _change = (lambda y: y[:, None] > torch.arange(5)) if _binary else _change

    def _build(change: Callable[[Tensor], Tensor] = _change, loss: str = _loss) -> Setup:
        return labels(change, loss)

    def _mended(change: Callable[[Tensor], Tensor] = _remedy, loss: str = _loss) -> Setup:
        return labels(change, loss)

    _build.__name__ = _name
    _more: dict[str, Any] = {"says": _says, "where": None, "never_says": ("enlarge the model",), "whole": _whole}
    built(REFUSED, oracle=_mended, rewritten=_mended, **_more)(_build)


@built(REFUSED, where=None, says=(".long()",), oracle=labels, rewritten=labels, whole=True)
def labels_of_int32_for_a_weighted_loss() -> Setup:
    return labels(lambda y: y.int(), nn.CrossEntropyLoss(weight=torch.ones(5)))


# Shapes that depend on values.

NOT_A_NUMBER: dict[str, Any] = {"never_says": (".item()", ".tolist()")}


def says(obstacle: explain.Obstacle, **more: Any) -> Mapping[str, Any]:
    return {"says": (obstacle.rewrite,), **NOT_A_NUMBER, **more}


def _classes(h: Tensor) -> Tensor:
    """0, 1 or 2 for each sample; the largest is at least 1."""
    return torch.arange(len(h)) % 2 + (h[:, 0] > 0)


each(REFUSED, **says(explain._CLASSES, whole=True))(
    one_hot=lambda net, h: h + functional.one_hot(_classes(h))[:, :1]  # here
).rewrite()(lambda net, h: h + functional.one_hot(_classes(h), num_classes=3)[:, :1])


@case(REFUSED, **says(explain._SIZE, whole=True))
def cut_at_the_longest(net: Any, h: Tensor) -> Tensor:
    n = _classes(h) + 1
    return h + h[:, : n.max()].amax(1, keepdim=True)  # here


@cut_at_the_longest.rewrite()
def mask_behind_the_longest(net: Any, h: Tensor) -> Tensor:
    n = _classes(h) + 1
    return h + h.masked_fill(torch.arange(4) >= n.max(), -torch.inf).amax(1, keepdim=True)


each(REFUSED, **says(explain._COUNTS, whole=True))(
    counts_of_nine_classes=lambda net, h: h + torch.bincount(_classes(h), minlength=9)[:4] * 0.1  # here
).rewrite()(lambda net, h: h + functional.one_hot(_classes(h), 9).sum(0)[:4] * 0.1)


@case(REFUSED, **says(explain._REPEATS, whole=True))
def samples_repeated(net: Any, h: Tensor) -> Tensor:
    counts = torch.where(h[:, 0] > h[:, 0].mean(), 2, 1)
    return torch.repeat_interleave(h, counts, dim=0)[:4]  # here


@samples_repeated.rewrite()
def samples_taken_by_index(net: Any, h: Tensor) -> Tensor:
    counts = torch.where(h[:, 0] > h[:, 0].mean(), 2, 1)
    return h.index_select(0, (torch.arange(4)[:, None] >= counts.cumsum(0)).sum(1))


@case(REFUSED, **says(explain.SHAPE, whole=True))
def samples_found_by_nonzero(net: Any, h: Tensor) -> Tensor:
    found = (h[:, 0] >= h[:, 0].mean()).nonzero().squeeze(1)  # here
    return h + h[found].amax(0)  # here


@samples_found_by_nonzero.rewrite()
def samples_found_by_a_mask(net: Any, h: Tensor) -> Tensor:
    mask = h[:, :1] >= h[:, 0].mean()
    return h + torch.where(mask, h, -torch.inf).amax(0)


@case(EITHER, whole=True)
def elements_assigned_by_a_mask(net: Any, h: Tensor) -> Tensor:
    h = h.clone()
    m = h > 0
    h[m] = h[m] * 2  # here
    return h


elements_assigned_by_a_mask.rewrite()(lambda net, h: torch.where(h > 0, h * 2, h))


@case(REFUSED, **says(explain._BRANCH))
def branch_on_a_value(net: Any, h: Tensor) -> Tensor:
    if h.mean() > 0:  # here
        return h * 2
    return h.tanh()


branch_on_a_value.rewrite()(lambda net, h: torch.where(h.mean() > 0, h * 2, h.tanh()))


# Parameters and modules.


each(REFUSED, given(table=lambda: nn.Embedding(3, 4, max_norm=1.0)), **says(explain._MAX_NORM), own_losses=True)(
    embedding_with_max_norm=lambda net, h: h + net.table(_classes(h))  # here
).rewrite(given(table=lambda: nn.Embedding(3, 4)))(
    lambda net, h: h + functional.embedding(_classes(h), torch.renorm(net.table.weight, 2, 0, 1.0))
)


@case(REFUSED, **says(explain._FROZEN))
def layer_frozen_in_forward(net: Any, h: Tensor) -> Tensor:
    net.b.requires_grad_(False)  # here
    critic = net.b(h)
    net.b.requires_grad_(True)  # here
    return h + critic


@layer_frozen_in_forward.rewrite()
def layer_with_detached_weights(net: Any, h: Tensor) -> Tensor:
    return h + functional.linear(h, net.b.weight.detach(), net.b.bias.detach())


@case(EITHER, whole=True, says=("detach()",))
def parameters_frozen_one_by_one(net: Any, h: Tensor) -> Tensor:
    for one in net.b.parameters():
        one.requires_grad = False  # here
    critic = net.b(h)
    for one in net.b.parameters():
        one.requires_grad = True  # here
    return h + critic


parameters_frozen_one_by_one.rewrite()(layer_with_detached_weights)


def _norm() -> nn.Module:
    return nn.BatchNorm1d(4, affine=False)


each(REFUSED, given(norms=lambda: [_norm()]), says=(explain.UNREGISTERED.rewrite,), never_says=("steps",))(
    batch_norm_in_a_list=lambda net, h: net.norms[0](h)  # here
).rewrite(given(norms=lambda: nn.ModuleList([_norm()])))(lambda net, h: net.norms[0](h))


each(EITHER, given(norms=lambda: {"first": _norm()}), says=("ModuleDict",), never_says=("steps",), whole=True)(
    batch_norm_in_a_dict=lambda net, h: net.norms["first"](h)  # here
).rewrite(given(norms=lambda: nn.ModuleDict({"first": _norm()})))(lambda net, h: net.norms["first"](h))


@case(REFUSED, given(lstm=lambda: nn.LSTM(4, 4), state=None), says=(explain.REWRITES["tensor"],), whole=True)
def state_of_an_lstm_carried(net: Any, h: Tensor) -> Tensor:
    result, (hidden, cell) = net.lstm(h.unsqueeze(0), net.state)
    net.state = (hidden.detach(), cell.detach())  # here
    return result[0]


def _zeros() -> Tensor:
    return torch.zeros(1, 4, 4)


@state_of_an_lstm_carried.rewrite(given(lstm=lambda: nn.LSTM(4, 4), hidden=_zeros, cell=_zeros))
def state_of_an_lstm_in_buffers(net: Any, h: Tensor) -> Tensor:
    result, (hidden, cell) = net.lstm(h.unsqueeze(0), (net.hidden.clone(), net.cell.clone()))
    net.hidden.copy_(hidden.detach())
    net.cell.copy_(cell.detach())
    return result[0]


def _spectral(net: Any) -> None:
    spectral_norm(net.b)


each(EITHER, _spectral, says=("parametrizations",), where=None, own_losses=True, whole=True)(
    spectral_norm_of_old=lambda net, h: h
).rewrite(lambda net: parametrizations.spectral_norm(net.b))(lambda net, h: h)


QUEUE = given(queue=lambda: torch.ones(8, 4), ptr=lambda: torch.zeros(1, dtype=torch.long))


@case(EITHER, QUEUE, whole=True)
def queue_with_a_pointer(net: Any, h: Tensor) -> Tensor:
    ptr = int(net.ptr)  # here
    logits = h @ net.queue.clone().T
    net.queue[ptr : ptr + 4] = h.detach()
    net.ptr[0] = (ptr + 4) % 8
    return h + logits.logsumexp(1, keepdim=True)


@queue_with_a_pointer.rewrite(QUEUE)
def queue_with_an_index(net: Any, h: Tensor) -> Tensor:
    logits = h @ net.queue.clone().T
    net.queue.index_copy_(0, net.ptr + torch.arange(4), h.detach())
    net.ptr.copy_((net.ptr + 4) % 8)
    return h + logits.logsumexp(1, keepdim=True)


def _with_teacher(net: Any) -> None:
    net.teacher = [copy.deepcopy(net.b).requires_grad_(False)]


@case(REFUSED, _with_teacher, says=(explain._PARAMETER.rewrite,), whole=True)
def teacher_that_follows(net: Any, h: Tensor) -> Tensor:
    for one, other in zip(net.teacher[0].parameters(), net.b.parameters(), strict=True):
        one.data.mul_(0.9).add_(other.data, alpha=0.1)  # here
    return h + net.teacher[0](h)


def _teacher_in_buffers(net: Any) -> None:
    net.register_buffer("weight", net.b.weight.detach().clone())
    net.register_buffer("bias", net.b.bias.detach().clone())


@teacher_that_follows.rewrite(_teacher_in_buffers)
def teacher_in_buffers(net: Any, h: Tensor) -> Tensor:
    net.weight.mul_(0.9).add_(net.b.weight.detach(), alpha=0.1)
    net.bias.mul_(0.9).add_(net.b.bias.detach(), alpha=0.1)
    return h + functional.linear(h, net.weight, net.bias)


# What is no reason is not listed, and a generator that is torch's own is not called the model's.


each(EQUAL, never_says=("of its own",), whole=True)(
    draw_from_the_default_generator=lambda net, h: h + torch.randn(4, generator=torch.default_generator)
)


@case(EITHER, never_says=("one_hot",))
def one_reason_beside_what_is_none(net: Any, h: Tensor) -> Tensor:
    h = h + functional.one_hot(_classes(h), 4)
    return h / h.detach().abs().max().item()  # here


@case(EITHER, never_says=("manual_check",), whole=True)
def one_reason_beside_an_assertion(net: Any, h: Tensor) -> Tensor:
    assert bool(h.isfinite().all()), "manual_check"
    return h / float(h.detach().abs().max())  # here


each(REFUSED, says=(explain._NUMBER.rewrite,), whole=True)(
    number_of_a_tensor=lambda net, h: h / h.detach().abs().max().item()  # here
).rewrite()(lambda net, h: h / h.detach().abs().max())
one_reason_beside_what_is_none.rewrite()(lambda net, h: _divided(h + functional.one_hot(_classes(h), 4)))


def _divided(h: Tensor) -> Tensor:
    return h / h.detach().abs().max()


@built(EITHER, where="scale.item()", whole=True)
def number_in_a_loss_function() -> Setup:
    def loss(result: Tensor, target: Tensor) -> Tensor:
        scale = target.abs().max()
        return functional.mse_loss(result / scale.item(), target / scale.item())

    return with_loss(loss)


@number_in_a_loss_function.rebuilt
def tensor_in_a_loss_function() -> Setup:
    def loss(result: Tensor, target: Tensor) -> Tensor:
        scale = target.abs().max()
        return functional.mse_loss(result / scale, target / scale)

    return with_loss(loss)
