"""Tensors of the model: buffers that are replaced, `.data`, dtypes, the names of weights, and bits."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import sambasim as ss
from sambasim.compiler.capture import trial
from tests.state.case import (
    BATCH,
    EITHER,
    EQUAL,
    RATE,
    TOLD,
    Outputs,
    Setup,
    Then,
    built,
    case,
    each,
    given,
    net_of,
    points,
    setups,
)

LAST = given(last=lambda: torch.zeros(4))


def copies_into_it(net: Any, h: Tensor) -> Tensor:
    net.last.copy_(h.detach().mean(0))
    return h


@case(EQUAL, given(steps=lambda: torch.zeros(())), also=lambda *found: kept_in_evaluation(*found))
def buffer_that_counts_in_evaluation_too(net: Any, h: Tensor) -> Tensor:
    net.steps.add_(1)
    return h * torch.where(net.steps > 2, 1.0, 0.5)


def kept_in_evaluation(setup: Setup, state: Any, pef: Any, run: Any) -> str:
    told = [one for one in pef.notices if one.startswith("changed by forward() in evaluation too")]
    return "" if any(one.endswith(": steps") for one in told) else "the buffer is not told"


@case(EITHER, LAST, says=("last", "copy_"))
def buffer_replaced_in_the_dict(net: Any, h: Tensor) -> Tensor:
    net._buffers["last"] = h.detach().mean(0)  # here
    return h


@case(EITHER, LAST, says=("last", "copy_"), whole=True)
def buffer_replaced_by_data(net: Any, h: Tensor) -> Tensor:
    net.last.data = h.detach().mean(0)  # here
    return h


@case(EITHER, LAST, says=("last", "copy_"), whole=True)
def buffer_assigned(net: Any, h: Tensor) -> Tensor:
    net.last = h.detach().mean(0)  # here
    return h


@case(EITHER, LAST, says=("last", "copy_"), whole=True)
def buffers_updated(net: Any, h: Tensor) -> Tensor:
    net._buffers.update(last=h.detach().mean(0))  # here
    return h


@case(EITHER, LAST, says=("last", "copy_"), whole=True)
def buffer_set(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.last.set_(h.detach().mean(0))  # here
    return h


@case(EITHER, LAST, says=("last", "copy_"), whole=True)
def buffer_registered_again(net: Any, h: Tensor) -> Tensor:
    net.register_buffer("last", h.detach().mean(0))  # here
    return h


for replaced in (buffer_replaced_in_the_dict, buffer_replaced_by_data, buffer_assigned, buffers_updated, buffer_set):
    replaced.rewrite(LAST)(copies_into_it)


@case(EITHER, LAST, whole=True)
def moving_mean_replaced_and_read(net: Any, h: Tensor) -> Tensor:
    shifted: Tensor = h - net.last
    net._buffers["last"] = 0.9 * net.last + 0.1 * h.detach().mean(0)  # here
    return shifted


@case(EITHER, whole=True)
def parameter_replaced_by_data(net: Any, h: Tensor) -> Tensor:
    net.b.weight.data = net.b.weight.data.clamp(-0.3, 0.3)  # here
    return h


@case(EITHER, whole=True)
def parameter_clamped_by_data(net: Any, h: Tensor) -> Tensor:
    net.b.weight.data.clamp_(-0.3, 0.3)  # here
    return h


# `.data` is a detached tensor of the same memory.


@case(EITHER)
def data_of_an_activation_assigned(net: Any, h: Tensor) -> Tensor:
    v = h * 1
    v.data = v.data * 3  # here
    return v


@case(EITHER, whole=True)
def data_of_an_activation_changed(net: Any, h: Tensor) -> Tensor:
    v = h * 1
    v.data.mul_(2)  # here
    return v


@case(EITHER, says=(trial._DATA.rewrite,), own_losses=True)
def data_of_an_activation_filled(net: Any, h: Tensor) -> Tensor:
    v = h.tanh()
    v.data[:, 0] = 0.5  # here
    return v


@data_of_an_activation_filled.rewrite()
def data_of_a_copy_filled(net: Any, h: Tensor) -> Tensor:
    v = h.tanh().clone()
    v.data[:, 0] = 0.5
    return v


@case(EITHER, whole=True)
def data_of_an_activation_copied_into(net: Any, h: Tensor) -> Tensor:
    v = h + 0
    v.data.copy_(h.detach().sign())  # here
    return v


@case(EQUAL)
def straight_through_by_data(net: Any, h: Tensor) -> Tensor:
    w = net.b.weight
    return h * (w + (torch.sign(w.data) - w).detach())


@case(EQUAL, given(mean=lambda: torch.zeros(4)), whole=True)
def data_of_a_buffer_changed(net: Any, h: Tensor) -> Tensor:
    net.mean.data.mul_(0.9).add_(h.data.mean(0), alpha=0.1)
    return h - net.mean


# The default dtype, and inputs that are not float32.


@case(EQUAL, whole=True)
def constant_in_float64(net: Any, h: Tensor) -> Tensor:
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    c = torch.full((4,), 1e-3) + 1e7
    torch.set_default_dtype(old)
    return h + (c - 1e7).float()


@case(EQUAL, whole=True)
def positions_in_float64(net: Any, h: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        positions = torch.linspace(0, 1, 4) + 1e8
    finally:
        torch.set_default_dtype(torch.float32)
    return h + (positions - 1e8).to(h.dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


@case(EQUAL, whole=True)
def draws_in_float64(net: Any, h: Tensor) -> Tensor:
    with _default_dtype(torch.float64):
        noise = torch.rand(4) * 1e-9 + torch.tensor(1 / 3)
    return h * noise.float()


def _of_dtype(dtype: torch.dtype) -> Setup:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            factor = 1.0 if x.dtype == torch.float32 else 3.0
            loss: Tensor = (self.net(x.float()).squeeze(1) * factor - y.float()).square().mean()
            return loss

    torch.manual_seed(0)
    x, y = points()
    return Setup(Asks(), (x.to(dtype), y))


setups(EQUAL | TOLD, notice="float64")(inputs_of_float64=lambda: _of_dtype(torch.float64))


@built(EQUAL | TOLD, notice="float64", whole=True)
def labels_of_float64() -> Setup:
    setup = net_of(lambda net, h: h.double().float())
    x, y = setup.data
    setup.data = (x, y.double())
    return setup


setups(EQUAL, whole=True)(inputs_of_float16=lambda: _of_dtype(torch.float16))


# A wrapped layer has other names in `named_parameters` than in `state_dict`, which is what is saved.


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


def _outputs(prepare: Callable[[Any], object], then: Then = lambda net, h: h) -> Setup:
    torch.manual_seed(0)
    model = Outputs(then)
    prepare(model)
    return Setup(model, points(), "mse")


@built(EQUAL, also=predicts)
def layer_in_a_checkpoint_wrapper() -> Setup:
    return _outputs(given(a=lambda: checkpoint_wrapper(nn.Linear(3, 4))))


@built(EQUAL, also=predicts, whole=True)
def layer_in_two_wrappers() -> Setup:
    def wrapped() -> nn.Module:
        inner = checkpoint_wrapper(nn.Sequential(nn.Tanh(), nn.Linear(5, 4)))
        return checkpoint_wrapper(nn.Sequential(nn.Linear(3, 5), inner))

    return _outputs(given(a=wrapped))


class _Renamed(nn.Linear):
    """Is saved as `kernel`, as models are that keep the names of another framework."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_state_dict_post_hook(_saves)
        self.register_load_state_dict_pre_hook(_loads)


def _saves(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


def _loads(module: nn.Module, state: dict[str, Tensor], prefix: str, *others: object) -> None:
    if f"{prefix}kernel" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


@built(EITHER, also=predicts, where=None, whole=True)
def weight_renamed_by_hooks() -> Setup:
    return _outputs(given(a=lambda: _Renamed(3, 4)))


class _Unsaved(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_state_dict_post_hook(_drops)


def _drops(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
    del state[f"{prefix}bias"]


@built(frozenset({"refused"}), where=None, says=("a.bias",), whole=True)
def parameter_that_is_not_saved() -> Setup:
    return _outputs(given(a=lambda: _Unsaved(3, 4)))


def _tied(net: Any) -> None:
    net.c = nn.Linear(4, 4)
    net.d = nn.Linear(4, 4)
    net.d.weight = net.c.weight


# Bits that were off.


each(EQUAL, whole=True)(
    data_of_a_parameter_read=lambda net, h: h + net.b.weight.data.sum(),
    data_of_an_activation_read=lambda net, h: h - h.data.mean(0),
    data_in_a_norm=lambda net, h: h / (net.a.weight.data.norm() + h.data.abs().max()),
    addcdiv_with_a_value=lambda net, h: torch.addcdiv(h, h * 2, h.square() + 1, value=0.3),
    addcmul_with_a_value=lambda net, h: torch.addcmul(h, h.tanh(), h.sigmoid(), value=0.3),
    lerp_by_a_number=lambda net, h: torch.lerp(h, h.tanh(), 0.3).addcdiv(h, h.square() + 1, value=-0.7),
)


def _bfloat16(momentum: float = 0.0) -> Setup:
    setup = _outputs(lambda net: net.bfloat16())
    setup.data = (setup.data[0].bfloat16(), setup.data[1].bfloat16())
    setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=RATE, momentum=momentum)
    return setup


setups(EQUAL | TOLD, notice="differs from eager PyTorch by rounding")(model_in_bfloat16=lambda: _bfloat16())


@built(EQUAL | TOLD, notice="differs from eager PyTorch by rounding", whole=True)
def model_in_bfloat16_with_momentum() -> Setup:
    return _bfloat16(0.9)


class _Sequence(nn.Module):
    """`layer` reads [batch, 6, 4], and gives as much, or a tuple with that."""

    def __init__(self, layer: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        arguments = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        result = self.layer(*arguments)
        result = result[0] if isinstance(result, tuple) else result
        return self.last(result.mean(1)).squeeze(1)


def _sequence(make: Callable[[], nn.Module], width: int = 4) -> Setup:
    torch.manual_seed(0)
    x = torch.randn(8 * BATCH, 6, 4, generator=torch.Generator().manual_seed(1))
    return Setup(_Sequence(make(), width), (x, x.mean((1, 2))), "mse")


setups(EQUAL, also=predicts, whole=True)(
    weight_with_a_parametrization=lambda: _outputs(given(a=lambda: parametrizations.weight_norm(nn.Linear(3, 4)))),
    weights_that_are_tied=lambda: _outputs(_tied, lambda net, h: net.d(torch.tanh(net.c(h)))),
    evaluation_of_attention_with_bias_kv=lambda: _sequence(
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
    ),
    evaluation_of_a_transformer_with_norm_first=lambda: _sequence(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True)
    ),
    evaluation_of_an_lstm_with_projection=lambda: _sequence(lambda: nn.LSTM(4, 8, proj_size=4, batch_first=True)),
)
