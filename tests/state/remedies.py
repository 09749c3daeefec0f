"""Remedies that no other module applies: each obstacle of the compiler has a case that it refuses in these words, and
the rewrite is equal."""

# Calling a module gives Any, and parts of autograd have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import itertools
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from sambasim.compiler.capture import explain, trial
from tests.state.case import REFUSED, Net, Setup, built, case, each, given, net_of, points, zero

each(REFUSED, says=(explain._INDEX.rewrite,), whole=True)(
    row_of_the_largest=lambda net, h: h + h[h[:, 0].argmax()]  # here
).rewrite()(lambda net, h: h + h.index_select(0, h[:, 0].argmax().view(1))[0])


LSTM = given(lstm=lambda: nn.LSTM(4, 4, batch_first=True), lengths=lambda: torch.tensor([1, 4, 2, 3]))


@case(REFUSED, LSTM, says=(explain._PACKED.rewrite,), own_losses=True)
def packed_sequence(net: Any, h: Tensor) -> Tensor:
    packed = pack_padded_sequence(h.expand(4, 4, 4), net.lengths, True, False)  # here
    return pad_packed_sequence(net.lstm(packed)[0], True, 0.0, 4)[0].sum(1)


@packed_sequence.rewrite(LSTM)
def padded_sequence(net: Any, h: Tensor) -> Tensor:
    outputs = net.lstm(h.expand(4, 4, 4))[0]
    return (outputs * (torch.arange(4) < net.lengths[:, None]).unsqueeze(-1)).sum(1)


each(REFUSED, says=(explain._NUMPY.rewrite,), own_losses=True)(
    tanh_of_numpy=lambda net, h: h + torch.from_numpy(np.tanh(h.detach().numpy()))  # here
).rewrite()(lambda net, h: h + torch.tanh(h.detach()))


each(REFUSED, given(mix=lambda: [torch.eye(4).to_sparse()]), says=(explain._SPARSE.rewrite,), whole=True)(
    sparse_constant=lambda net, h: h + torch.sparse.mm(net.mix[0], h)  # here
).rewrite(given(mix=lambda: torch.eye(4)))(lambda net, h: h + net.mix @ h)


def _ctc(h: Tensor, lengths: Any, targets: Any) -> Tensor:
    return functional.ctc_loss(h.log_softmax(1)[:, None], torch.tensor([[1, 2]]), lengths, targets)


each(REFUSED, says=(explain._LENGTHS.rewrite,), where="functional.ctc_loss", whole=True)(
    lengths_that_are_numbers=lambda net, h: h + _ctc(h, (4,), (2,))
).rewrite()(lambda net, h: h + _ctc(h, torch.full((1,), 4), torch.full((1,), 2)))


class Doubling(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x *= 2  # here
        return super().forward(x, y)


class Doubled(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * 2, y)


def _of(model: type[Net]) -> Setup:
    torch.manual_seed(0)
    return Setup(model(), points())


@built(REFUSED, says=(explain._INPUT.rewrite,))
def input_changed_in_place() -> Setup:
    return _of(Doubling)


input_changed_in_place.rebuilt(lambda: _of(Doubled))

TOTAL = [torch.zeros(4)]


each(REFUSED, lambda net: TOTAL[0].zero_(), says=(explain._CONSTANT.rewrite,), whole=True)(
    total_in_a_global=lambda net, h: h + TOTAL[0].add_(h.detach().mean(0)).clone()  # here
).rewrite(given(total=lambda: torch.zeros(4)))(lambda net, h: h + net.total.add_(h.detach().mean(0)).clone())


# What a trace would lose.


class WithoutZeros(torch.autograd.Function):
    zeros = False

    @classmethod
    def forward(cls, context: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if not cls.zeros:
            context.set_materialize_grads(False)  # here
        return x.clone(), x.clone()

    @staticmethod
    def backward(context: Any, one: Tensor, other: Tensor | None) -> Tensor:
        return one if other is None else one + other


class WithZeros(WithoutZeros):
    zeros = True


each(REFUSED, says=(trial._NO_ZEROS.rewrite,), whole=True)(
    gradients_that_are_none=lambda net, h: WithoutZeros.apply(h)[0]
).rewrite()(lambda net, h: WithZeros.apply(h)[0])


@case(REFUSED, says=(trial._SAVED.rewrite,), own_losses=True)
def saved_tensors_changed(net: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved):  # here
        return h.sigmoid()


saved_tensors_changed.rewrite()(lambda net, h: h.sigmoid())


each(REFUSED, says=(trial._CHECKPOINTED.rewrite,), own_losses=True, whole=True)(
    checkpoint_that_draws_again=lambda net, h: checkpoint(  # here
        functional.dropout, h, use_reentrant=False, preserve_rng_state=False
    )
).rewrite()(lambda net, h: checkpoint(functional.dropout, h, use_reentrant=False))


@case(REFUSED, says=(trial._VERSION.rewrite,), own_losses=True, whole=True)
def steps_by_version(net: Any, h: Tensor) -> Tensor:
    return h / (1 + net.b.weight._version)  # here


@steps_by_version.rewrite(given(steps=zero))
def steps_in_a_buffer(net: Any, h: Tensor) -> Tensor:
    return h / net.steps.add_(1).clone()


@case(REFUSED, says=(trial._INFERENCE_MODE.rewrite,), whole=True)
def inference_mode(net: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():  # here
        scale = net.b.weight.square().mean()
    return h + scale


@inference_mode.rewrite()
def no_gradients(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.b.weight.square().mean()
    return h + scale


# State, draws and seeds.


@case(REFUSED, given(n=0), says=(explain.REWRITES["value"],), whole=True)
def steps_in_an_attribute(net: Any, h: Tensor) -> Tensor:
    net.n += 1  # here
    return h / net.n


steps_in_an_attribute.rewrite(given(steps=zero))(steps_in_a_buffer)


each(REFUSED, given(rates=lambda: itertools.count(1)), says=(explain.REWRITES["position"],), whole=True)(
    rates_of_an_iterator=lambda net, h: h / next(net.rates)  # here
).rewrite(given(steps=zero))(steps_in_a_buffer)


@case(REFUSED, given(first=None), says=(explain.FIRST_CALL,))
def first_batch_kept(net: Any, h: Tensor) -> Tensor:
    if net.first is None:
        net.first = h.detach().mean(0)  # here
    return h - net.first


@first_batch_kept.rewrite(given(is_set=lambda: torch.zeros((), dtype=torch.bool), value=lambda: torch.zeros(4)))
def first_batch_in_a_buffer(net: Any, h: Tensor) -> Tensor:
    net.value.copy_(torch.where(net.is_set, net.value, h.detach().mean(0)))
    net.is_set.fill_(True)
    return h - net.value.clone()


def _timed_before() -> Setup:
    return net_of(lambda net, h: h * (1 + net.scale), given(scale=0.25))


each(REFUSED, says=(explain.DIFFERS.rewrite,), oracle=_timed_before, rewritten=_timed_before)(
    time_of_a_call=lambda net, h: h * (1 + time.perf_counter() % 1)  # here
)


each(
    REFUSED,
    given(own=lambda: torch.Generator().manual_seed(1)),
    says=(explain.GENERATOR.rewrite,),
    own_losses=True,
    whole=True,
)(
    generator_of_its_own=lambda net, h: h + torch.randn(4, generator=net.own)  # here
).rewrite()(lambda net, h: h + torch.randn(4))


@case(REFUSED, says=(explain.SEEDED.rewrite,), whole=True)
def seed_in_forward(net: Any, h: Tensor) -> Tensor:
    torch.manual_seed(3)  # here
    return h + torch.randn(4)


def _with_noise(net: Any) -> None:
    torch.manual_seed(3)
    net.register_buffer("noise", torch.randn(4))


seed_in_forward.rewrite(_with_noise)(lambda net, h: h + net.noise)
