"""Each obstacle of the compiler is refused at its line, in words that fit it, and the remedy, applied, is equal."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.state.case import cases, given, remedy


def says(obstacle: str, **more: Any) -> Mapping[str, Any]:
    return {"says": (remedy(obstacle),), "never_says": (".item()", ".tolist()"), **more}


LSTM = given(lstm=lambda: nn.LSTM(4, 4, batch_first=True), lengths=lambda: torch.tensor([1, 4, 2, 3]))


TOTAL = [torch.zeros(4)]


NO_STEPS = {"never_says": ("steps",)}
MAX_NORM = given(table=lambda: nn.Embedding(3, 4, max_norm=1.0))
SPARSE = given(mix=lambda: [torch.eye(4).to_sparse()])
OF_PYTHON = given(own=lambda: random.Random(0))
QUEUE = given(queue=lambda: torch.zeros(12, 4), at=lambda: torch.tensor(0))
GENERATOR = given(own=lambda: torch.Generator().manual_seed(1))


cases(__name__)("""
import copy
import numpy as np
import time
from sambasim.compiler.capture import explain, trial
from torch.nn.utils import parametrizations, spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

# Shapes that depend on values.
def _classes(h):
    return torch.arange(len(h)) % 2 + (h[:, 0] > 0)
case one_hot: REFUSED, **says("one_hot()", whole=True)
    return h + functional.one_hot(_classes(h))[:, :1]  # here
rewrite:
    return h + functional.one_hot(_classes(h), num_classes=3)[:, :1]
case cut_at_the_longest: REFUSED, **says("a size", whole=True)
    n = _classes(h) + 1
    return h + h[:, : n.max()].amax(1, keepdim=True)  # here
rewrite mask_behind_the_longest:
    n = _classes(h) + 1
    return h + h.masked_fill(torch.arange(4) >= n.max(), -torch.inf).amax(1, keepdim=True)
case counts_of_nine_classes: REFUSED, **says("bincount()", whole=True)
    return h + torch.bincount(_classes(h), minlength=9)[:4] * 0.1  # here
rewrite:
    return h + functional.one_hot(_classes(h), 9).sum(0)[:4] * 0.1
case rate_of_a_dropout: REFUSED, **says("a dropout rate", whole=True)
    return functional.dropout(h, (h.detach().mean() > 99) * 0.5)  # here
rewrite:
    p = (h.detach().mean() > 99) * 0.5
    return h * (torch.rand_like(h) >= p) / (1 - p)
case samples_repeated: REFUSED, **says("repeat_interleave()", whole=True)
    counts = torch.where(h[:, 0] > h[:, 0].mean(), 2, 1)
    return torch.repeat_interleave(h, counts, dim=0)[:4]  # here
rewrite samples_taken_by_index:
    counts = torch.where(h[:, 0] > h[:, 0].mean(), 2, 1)
    return h.index_select(0, (torch.arange(4)[:, None] >= counts.cumsum(0)).sum(1))
case samples_found_by_nonzero: REFUSED, **says("a shape", whole=True)
    found = (h[:, 0] >= h[:, 0].mean()).nonzero().squeeze(1)  # here
    return h + h[found].amax(0)  # here
rewrite samples_found_by_a_mask:
    mask = h[:, :1] >= h[:, 0].mean()
    return h + torch.where(mask, h, -torch.inf).amax(0)
case elements_assigned_by_a_mask: EITHER, whole=True
    h = h.clone()
    m = h > 0
    h[m] = h[m] * 2  # here
    return h
rewrite:
    return torch.where(h > 0, h * 2, h)
case branch_on_a_value: REFUSED, **says("a branch")
    if h.mean() > 0:  # here
        return h * 2
    return h.tanh()
rewrite:
    return torch.where(h.mean() > 0, h * 2, h.tanh())

# Parameters and modules.
case embedding_with_max_norm: REFUSED, MAX_NORM, **says("max_norm"), own_losses=True
    return h + net.table(_classes(h))  # here
rewrite: given(table=lambda: nn.Embedding(3, 4))
    return h + functional.embedding(_classes(h), torch.renorm(net.table.weight, 2, 0, 1.0))
case layer_frozen_in_forward: REFUSED, **says("requires_grad")
    net.b.requires_grad_(False)  # here
    critic = net.b(h)
    net.b.requires_grad_(True)  # here
    return h + critic
rewrite layer_with_detached_weights:
    return h + torch.func.functional_call(net.b, {name: w.detach() for name, w in net.b.named_parameters()}, h)
def _norm():
    return nn.BatchNorm1d(4, affine=False)
case batch_norm_in_a_list: REFUSED, given(norms=lambda: [_norm()]), says=(remedy("a buffer or frozen"),), **NO_STEPS
    return net.norms[0](h)  # here
rewrite: given(norms=lambda: nn.ModuleList([_norm()]))
    return net.norms[0](h)
def _spectral(net):
    spectral_norm(net.b)
case spectral_norm_of_old: EITHER, _spectral, says=("parametrizations",), where=None, own_losses=True, whole=True
    return h
rewrite: lambda net: parametrizations.spectral_norm(net.b)
    return h
def _with_teacher(net):
    net.teacher = [copy.deepcopy(net.b).requires_grad_(False)]
case teacher_in_a_list: REFUSED, _with_teacher, says=(remedy("a buffer or frozen"),), whole=True
    for one, other in zip(net.teacher[0].parameters(), net.b.parameters(), strict=True):
        one.data.mul_(0.9).add_(other.data, alpha=0.1)  # here
    return h + net.teacher[0](h)
rewrite: lambda net: setattr(net, "teacher", nn.ModuleList([copy.deepcopy(net.b).requires_grad_(False)]))
    for one, other in zip(net.teacher[0].parameters(), net.b.parameters(), strict=True):
        one.data.mul_(0.9).add_(other.data, alpha=0.1)
    return h + net.teacher[0](h)
case queue_with_a_pointer: REFUSED, QUEUE, says=(remedy("the value of a tensor as a whole"),)
    at = int(net.at)  # here
    net.queue[at : at + 4] = h.detach()
    net.at.fill_((at + 4) % 12)
    return h + net.queue.mean(0)
rewrite queue_by_indices: QUEUE
    net.queue.index_copy_(0, (net.at + torch.arange(4)) % 12, h.detach())
    net.at.add_(4).remainder_(12)
    return h + net.queue.mean(0)

# What is no reason is not listed, and a generator that is torch's own is not called the model's.
case draw_from_the_default_generator: EQUAL, never_says=("of its own",), whole=True
    return h + torch.randn(4, generator=torch.default_generator)
def _divided(h):
    return h / h.detach().abs().max()
case one_reason_beside_what_is_none: REFUSED, says=(explain._NUMBER.rewrite,), never_says=("one_hot",), whole=True
    h = h + functional.one_hot(_classes(h), 4)
    return h / h.detach().abs().max().item()  # here
rewrite:
    return _divided(h + functional.one_hot(_classes(h), 4))
case one_reason_beside_an_assertion: EITHER, never_says=("manual_check",), whole=True
    assert bool(h.isfinite().all()), "manual_check"
    return h / float(h.detach().abs().max())  # here

# What a trace would lose, state, draws and seeds.
case row_of_the_largest: REFUSED, says=(remedy("an index"),), whole=True
    return h + h[h[:, 0].argmax()]  # here
rewrite:
    return h + h.index_select(0, h[:, 0].argmax().view(1))[0]
case packed_sequence: REFUSED, LSTM, says=(remedy("a packed"),), own_losses=True, whole=True
    packed = pack_padded_sequence(h.expand(4, 4, 4), net.lengths, True, False)  # here
    return pad_packed_sequence(net.lstm(packed)[0], True, 0.0, 4)[0].sum(1)
rewrite padded_sequence: LSTM
    outputs = net.lstm(h.expand(4, 4, 4))[0]
    return (outputs * (torch.arange(4) < net.lengths[:, None]).unsqueeze(-1)).sum(1)
case tanh_of_numpy: REFUSED, says=(remedy("NumPy"),), own_losses=True
    return h + torch.from_numpy(np.tanh(h.detach().numpy()))  # here
rewrite:
    return h + torch.tanh(h.detach())
case sparse_constant: REFUSED, SPARSE, says=(remedy("a sparse"),), whole=True
    return h + torch.sparse.mm(net.mix[0], h)  # here
rewrite: given(mix=lambda: torch.eye(4))
    return h + net.mix @ h
def _ctc(h, lengths, targets):
    return functional.ctc_loss(h.log_softmax(1)[:, None], torch.tensor([[1, 2]]), lengths, targets)
case lengths_that_are_numbers: REFUSED, says=(remedy("ctc_loss()"),), where="functional.ctc_loss"
    return h + _ctc(h, (4,), (2,))
rewrite:
    return h + _ctc(h, torch.full((1,), 4), torch.full((1,), 2))
built input_changed_in_place: REFUSED, says=(remedy("an input"),), whole=True
    def forward(net, x, y):
        x *= 2  # here
        return functional.mse_loss(net.layer(x).squeeze(1), y)
    return made(forward, layer=lambda: nn.Linear(3, 1))
rebuilt:
    return made(lambda net, x, y: functional.mse_loss(net.layer(x * 2).squeeze(1), y), layer=lambda: nn.Linear(3, 1))
case total_in_a_global: REFUSED, lambda net: TOTAL[0].zero_(), says=(remedy("a tensor that is changed"),), whole=True
    return h + TOTAL[0].add_(h.detach().mean(0)).clone()  # here
rewrite: given(total=lambda: torch.zeros(4))
    return h + net.total.add_(h.detach().mean(0)).clone()

# What a trace would lose.
class WithoutZeros(torch.autograd.Function):
    zeros = False
    @classmethod
    def forward(cls, context, x):
        if not cls.zeros:
            context.set_materialize_grads(False)  # here
        return x.clone(), x.clone()
    @staticmethod
    def backward(context, first, second):
        return first if second is None else first + second
class WithZeros(WithoutZeros):
    zeros = True
case gradients_that_are_none: REFUSED, says=(trial._NO_ZEROS.rewrite,), whole=True
    return WithoutZeros.apply(h)[0]
rewrite:
    return WithZeros.apply(h)[0]
case saved_tensors_changed: REFUSED, says=(trial._SAVED.rewrite,), own_losses=True
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved):  # here
        return h.sigmoid()
rewrite:
    return h.sigmoid()
case checkpoint_that_draws_again: REFUSED, says=(trial._CHECKPOINTED.rewrite,), own_losses=True, whole=True
    return checkpoint(functional.dropout, h, use_reentrant=False, preserve_rng_state=False)  # here
rewrite:
    return checkpoint(functional.dropout, h, use_reentrant=False)
case checkpoint_of_inputs_without_a_gradient: REFUSED, says=(trial._CHECKPOINTED.rewrite,)
    return h + checkpoint(net.b, torch.ones(4, 4), use_reentrant=True)  # here
case steps_by_version: REFUSED, says=(trial._VERSION.rewrite,), own_losses=True, whole=True
    return h / (1 + net.b.weight._version)  # here
rewrite steps_in_a_buffer: given(steps=zero)
    return h / net.steps.add_(1).clone()
case inference_mode: REFUSED, says=(trial._INFERENCE_MODE.rewrite,)
    scale = torch.inference_mode()(torch.square)(net.b.weight).mean()  # here
    return h + scale
rewrite no_gradients:
    with torch.no_grad():
        scale = net.b.weight.square().mean()
    return h + scale

# State, draws and seeds.
case numbers_of_a_generator_of_python: REFUSED, OF_PYTHON, says=(explain.REWRITES["position"],), own_losses=True
    return h * net.own.random()  # here
rewrite:
    return h * torch.rand(())
case first_batch_kept: REFUSED, given(first=None), says=(explain.FIRST_CALL,)
    if net.first is None:
        net.first = h.detach().mean(0)  # here
    return h - net.first
rewrite first_batch_in_a_buffer: given(is_set=lambda: torch.zeros((), dtype=torch.bool), value=lambda: torch.zeros(4))
    net.value.copy_(torch.where(net.is_set, net.value, h.detach().mean(0)))
    net.is_set.fill_(True)
    return h - net.value.clone()
def _timed_before():
    return net_of(lambda net, h: h * (1 + net.scale), given(scale=0.25))
case time_of_a_call: REFUSED, says=(explain.DIFFERS.rewrite,), oracle=_timed_before, rewritten=_timed_before
    return h * (1 + time.perf_counter() % 1)  # here
case generator_of_its_own: REFUSED, GENERATOR, says=(explain.GENERATOR.rewrite,), own_losses=True
    return h + torch.randn(4, generator=net.own)  # here
rewrite:
    return h + torch.randn(4)
""")
