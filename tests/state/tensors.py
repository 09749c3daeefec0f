"""Tensors of the model: buffers that are replaced, `.data`, dtypes, the names of weights, and bits."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import sambasim as ss
from tests.state.case import BATCH, Setup, cases, given, made, net_of

LAST = given(last=lambda: torch.zeros(4))


def _copied(net: Any, h: Tensor) -> Tensor:
    net.last.copy_(h.detach().mean(0))
    return h


COPIED: dict[str, Any] = {"says": ("last", "copy_"), "rewritten": lambda: net_of(_copied, LAST)}


def kept_in_evaluation(setup: Setup, state: Any, pef: Any, run: Any) -> str:
    told = [one for one in pef.notices if one.startswith("changed by forward() in evaluation too")]
    return "" if any(one.endswith(": steps") for one in told) else "the buffer is not told"


def _of_dtype(dtype: torch.dtype) -> Setup:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        factor = 1.0 if x.dtype == torch.float32 else 3.0
        return (net.layer(x.float()).squeeze(1) * factor - y.float()).square().mean()

    setup = made(forward, layer=lambda: nn.Linear(3, 1))
    setup.data = (setup.data[0].to(dtype), setup.data[1])
    return setup


def predicts(fresh: Setup, state: Mapping[str, Tensor], pef: ss.Pef, run: ss.Run) -> str:
    """A complaint unless trained weights go back into the model, and the PEF predicts with them."""
    run.load_into(fresh.model)
    lost = [name for name, one in fresh.model.state_dict().items() if not torch.equal(one, state[name])]
    if lost:
        return f"load_into leaves {', '.join(lost)} as they were"
    x = fresh.data[0]
    outputs = ss.predict(pef, x, weights=run, threads=1).outputs[0]
    expected = torch.cat([fresh.model.eval()(x[i : i + BATCH]).detach() for i in range(0, len(x), BATCH)])
    if torch.equal(outputs, expected):
        return ""
    return f"predictions differ by {(outputs - expected).abs().max().item():.1e}"


def _sequence(make: Callable[[], nn.Module]) -> Setup:
    """What `make` makes reads [batch, 6, 4], and gives as much, or a tuple with that."""

    def forward(net: Any, x: Tensor) -> Tensor:
        result = net.layer(*((x, x, x) if isinstance(net.layer, nn.MultiheadAttention) else (x,)))
        return net.last((result[0] if isinstance(result, tuple) else result).mean(1)).squeeze(1)

    setup = made(forward, "mse", layer=make, last=lambda: nn.Linear(4, 1))
    x = torch.randn(8 * BATCH, 6, 4, generator=torch.Generator().manual_seed(1))
    setup.data = (x, x.mean((1, 2)))
    return setup


cases(__name__)("""
import copy
from sambasim.compiler.capture import trial
case buffer_that_counts_in_evaluation_too: EQUAL, given(steps=zero), also=kept_in_evaluation
    net.steps.add_(1)
    return h * torch.where(net.steps > 2, 1.0, 0.5)
case buffer_replaced_in_the_dict: EITHER, LAST, **COPIED
    net._buffers["last"] = h.detach().mean(0)  # here
case buffer_set: EITHER, LAST, **COPIED, whole=True
    with torch.no_grad():
        net.last.set_(h.detach().mean(0))  # here

# `.data` is a detached tensor of the same memory.
case data_of_an_activation_assigned: EITHER
    v = h * 1
    v.data = v.data * 3  # here
    return v
case data_of_an_activation_filled: EITHER, says=(trial._DATA.rewrite,), own_losses=True, whole=True
    v = h.tanh()
    v.data[:, 0] = 0.5  # here
    return v
rewrite data_of_a_copy_filled:
    v = h.tanh().clone()
    v.data[:, 0] = 0.5
    return v
case straight_through_by_data: EQUAL, whole=True
    w = net.b.weight
    return h * (w + (torch.sign(w.data) - w).detach())
case data_of_a_buffer_changed: EQUAL, given(mean=lambda: torch.zeros(4)), whole=True
    net.mean.data.mul_(0.9).add_(h.data.mean(0), alpha=0.1)
    return h - net.mean

# Tensors share the memory that `.data =` gives; a graph copies it.
SHARED: dict[str, Any] = {"says": ("a.data.copy_(b) for a.data = b",)}
case data_given_and_then_changed: REFUSED, LAST, **SHARED
    t = h.detach().mean(0)
    net.last.data = t
    t.mul_(2)  # here
    return h + net.last
case data_given_to_two: REFUSED, given(last=lambda: torch.zeros(4), other=lambda: torch.zeros(4)), **SHARED, whole=True
    net.last.data = net.other.data = h.detach().mean(0)
    net.other.mul_(2)  # here
    return h + net.last
case data_of_what_has_a_view: REFUSED, LAST, **SHARED, whole=True
    before = net.last.detach()
    net.last.data = h.detach().mean(0)
    return h + net.last - before  # here
case data_of_an_activation_that_has_a_view: REFUSED, **SHARED, whole=True
    v = h * 1
    before = v.detach()
    v.data = v.data * 3
    return v + before  # here
case data_given_twice: EQUAL, LAST, whole=True
    for _ in range(2):
        t = net.last * 0.9 + h.detach().mean(0)
        net.last.data = t
    net.last.data = t.clone()
    net.last.mul_(0.5)
    return h + net.last

# Frozen parameters that forward() changes.
def _with_teacher(net):
    net.teacher = copy.deepcopy(net.b).requires_grad_(False)
def _pairs(net):
    return list(zip(net.teacher.parameters(), net.b.parameters(), strict=True))
def _with_narrow_teacher(net):
    _with_teacher(net)
    net.teacher.bfloat16()
    net.tied = nn.Linear(4, 1, dtype=torch.bfloat16).requires_grad_(False)
    net.tied.weight = net.teacher.weight
case teacher_by_data: EQUAL, _with_teacher
    for one, other in _pairs(net):
        one.data = one.data * 0.9 + other.data * 0.1
    return h + net.teacher(h)
case teacher_after_it_is_read: EQUAL, _with_teacher, whole=True
    with torch.no_grad():
        h = h + net.teacher(h)
        torch._foreach_lerp_(list(net.teacher.parameters()), list(net.b.parameters()), 0.1)
    return h
case teacher_in_16_bits_by_its_parts: EQUAL | TOLD, _with_narrow_teacher, notice="by rounding", whole=True
    with torch.no_grad():
        net.teacher.weight[:, :2].mul_(0.9).add_(net.b.weight[:, :2], alpha=0.1)
        net.teacher.bias.copy_(net.b.bias * 0.5)
    return h + net.teacher(h.bfloat16()).float() + net.tied(h.bfloat16()).float()
case teacher_shares_memory: REFUSED, _with_teacher, says=("which forward() replaces",), own_losses=True, whole=True
    net.teacher.weight.data = net.b.weight.data  # here
    return h + net.teacher(h)
rewrite copied: _with_teacher
    net.teacher.weight.data.copy_(net.b.weight)
    return h + net.teacher(h)

# The default dtype, and inputs that are not float32.
case made_in_float64: EQUAL, whole=True
    torch.set_default_dtype(torch.float64)
    try:
        made = torch.rand(4) + torch.linspace(0, 1, 4) + torch.full((4,), 1e-3) + torch.tensor(1 / 3) + 1e8
    finally:
        torch.set_default_dtype(torch.float32)
    return h + (made - 1e8).to(h.dtype)
built inputs_of_float64: EQUAL | TOLD, notice="float64", whole=True
    return _of_dtype(torch.float64)
built inputs_of_float16: EQUAL, whole=True
    return _of_dtype(torch.float16)


# Bits that were off.
case lerp_addcmul_and_addcdiv_by_numbers: EQUAL, whole=True
    return torch.lerp(h, h.tanh(), 0.3).addcmul(h.tanh(), h.sigmoid(), value=0.3).addcdiv(h, h.square() + 1, value=-0.7)
built evaluation_of_attention_with_bias_kv: EQUAL, also=predicts, whole=True
    return _sequence(lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True))
built evaluation_of_a_transformer_with_norm_first: EQUAL, also=predicts, whole=True
    return _sequence(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True))
built evaluation_of_an_lstm_with_projection: EQUAL, also=predicts, whole=True
    return _sequence(lambda: nn.LSTM(4, 8, proj_size=4, batch_first=True))
built model_in_bfloat16_with_momentum: EQUAL | TOLD, notice="differs from eager PyTorch by rounding", whole=True
    torch.manual_seed(0)
    x, y = points()
    setup = Setup(Outputs().bfloat16(), (x.bfloat16(), y.bfloat16()), "mse")
    setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=RATE, momentum=0.9)
    return setup
""")
