"""The fingerprint of a step: equal for what compiles alike, another for whatever changes what is computed."""

# Calling a module gives Any, and parts of autograd are untyped.
# mypy: no-warn-return-any, allow-untyped-calls

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler.capture.step import Example
from sambasim.compiler.update import Update
from sambasim.options.compile import CompileOptions
from sambasim.samba.fingerprint import Request, fingerprint

SGD = Update("sgd", {"lr": 0.1, "momentum": 0.0})
TABLE = torch.tensor([1.0, 2.0, 3.0])
BATCH = 4
EXAMPLE = Example({"x": torch.ones(BATCH, 4)})

Then: TypeAlias = Callable[[Any, Tensor], Tensor]
"""What a net makes of the outputs of its layer."""


class Net(nn.Module):
    """A linear layer, whose outputs `then` makes into something, and their mean square."""

    table: Tensor

    def __init__(self, then: Then = lambda net, h: torch.relu(h)) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.then = then
        self.mask = torch.tensor([1.0, 0.0, 1.0])
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.one, self.other = torch.zeros(3), torch.zeros(3)
        self.several = [torch.zeros(3), torch.zeros(3)]
        self.named = {"a": torch.zeros(3)}
        self.factor = 2.0
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        print("called", random.random(), np.random.rand())  # what a model may do
        h = self.then(self, self.norm(self.linear(x)))
        return h.square().mean(), h


def fingerprint_of(net: nn.Module, *, dtype: Any = "fp32", **changed: Any) -> str | None:
    asked = Request(net, EXAMPLE, (SGD,), CompileOptions(dtype=dtype, inference=True))
    return fingerprint(replace(asked, **changed))


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


def hooked(net: Any, h: Tensor) -> Tensor:
    result = torch.relu(h)
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient * 2)
    return result


STEPS: Mapping[str, Then] = {
    "relu": lambda net, h: torch.relu(h),
    "gelu by tanh": lambda net, h: functional.gelu(h, approximate="tanh"),
    "a backward of its own": lambda net, h: Negated.apply(h),
    "a hook": hooked,
    "without gradient": lambda net, h: torch.no_grad()(torch.relu)(h) + 0 * h,
    "with gradient": lambda net, h: torch.relu(h) + 0 * h,
    "dropout": lambda net, h: net.dropout(torch.relu(h)),
    "a number": lambda net, h: torch.relu(h) * 2.0,
    "another number": lambda net, h: torch.relu(h) * 2.0000000000000004,
    "a table": lambda net, h: torch.relu(h) * TABLE,
    "made on the spot": lambda net, h: torch.relu(h) * torch.tensor([1.0, 2.0, 4.0]),
    "the mask": lambda net, h: torch.relu(h) * net.mask,
    "one of two equal tensors": lambda net, h: torch.relu(h) * net.one,
    "the other": lambda net, h: torch.relu(h) * net.other,
    "numpy": lambda net, h: torch.relu(h) * torch.from_numpy(np.cos(np.zeros(3))),
}


def test_what_computes_otherwise_has_another_fingerprint() -> None:
    found = {name: fingerprint_of(Net(then)) for name, then in STEPS.items()}
    assert None not in found.values()
    assert len(set(found.values())) == len(STEPS)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.linear.weight.requires_grad_(False),
        lambda net: net.norm.eval(),
        lambda net: setattr(net.norm, "eps", 1e-3),
        lambda net: net.mask.__setitem__(0, 3.0),
        lambda net: net.table.__setitem__(0, 3.0),
        lambda net: net.several[0].__setitem__(0, 3.0),
        lambda net: net.named["a"].__setitem__(0, 3.0),
        lambda net: net.register_buffer("table", torch.ones(3)),
        lambda net: setattr(net.linear, "bias", None),
        lambda net: setattr(net, "linear", nn.Sequential(net.linear)),
        lambda net: setattr(net.norm.weight, "data", net.norm.bias.data),
        lambda net: setattr(net, "then", lambda net, h: torch.relu(h) * net.mask + 0),
        lambda net: setattr(net, "__class__", type("Other", (Net,), {})),
    ],
)
def test_a_model_that_was_changed_has_another(change: Callable[[Any], object]) -> None:
    net, changed = Net(STEPS["the mask"]), Net(STEPS["the mask"])
    change(changed)
    assert fingerprint_of(changed) not in (None, fingerprint_of(net))
    assert fingerprint_of(net) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"example": Example({"x": torch.randn(BATCH + 1, 4)})},
        {"example": Example({"x": torch.randn(BATCH, 4, dtype=torch.bfloat16)}), "dtype": "bf16"},
        {"example": EXAMPLE._replace(by_keyword=True)},
        {"dtype": "bf16"},
        {"updates": ()},
        {"updates": (Update("sgd", {"lr": 0.1, "momentum": 0.9}),)},
        {"updates": (Update("sgd", {"lr": 0.1, "momentum": 0.0}, has_all_states=True),)},
        {"updates": (Update("sgd", {"lr": 0.1, "momentum": 0.0, "max_grad_norm": 1.0}),)},
        {"updates": (Update("sgd", {"lr": 0.1, "momentum": 0.0}, frozenset({"linear.weight"})),)},
        {"updates": (SGD, SGD)},
    ],
)
def test_another_way_to_compile_has_another(changed: dict[str, Any]) -> None:
    assert fingerprint_of(Net(), **changed) not in (None, fingerprint_of(Net()))


def test_values_of_weights_inputs_and_hyperparameters_may_differ() -> None:
    for name in ("dropout", "a hook", "made on the spot"):
        assert fingerprint_of(Net(STEPS[name])) == fingerprint_of(
            Net(STEPS[name]), example=Example({"x": torch.randn(BATCH, 4)})
        )
    assert fingerprint_of(Net(), updates=(Update("sgd", {"lr": 0.2, "momentum": 0.0}),)) == fingerprint_of(Net())


def test_the_model_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net(STEPS["dropout"]).eval()  # its training mode is entered, and left again
    net.dropout.train()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    attributes, parameters = dict(vars(net)), [id(parameter) for parameter in net.parameters()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"]
    assert fingerprint_of(net) is not None
    assert capsys.readouterr().out == ""
    assert vars(net) == attributes
    assert [id(parameter) for parameter in net.parameters()] == parameters
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [net.training, net.norm.training, net.dropout.training] == [False, False, True]
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state(legacy=False)["state"]["key"] == generators[2]).all()


def _grows(net: Any, h: Tensor) -> Tensor:
    while h.abs().max() < 1e30:
        h = h * 2
    return h


OUTSIDE = nn.BatchNorm1d(3)
GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    "then",
    [
        _grows,
        lambda net, h: h * TABLE.add_(1),
        lambda net, h: OUTSIDE(h),
        lambda net, h: h * torch.from_numpy(np.tanh(h.detach().numpy())),
        lambda net, h: h if h.tolist()[0][0] > 0 else -h,
        lambda net, h: h[h > 0],
        lambda net, h: h * copy.deepcopy(h.detach()),
        lambda net, h: h * torch.rand(3, generator=GENERATOR),
        lambda net, h: h * net.linear.bias.detach().add_(1),
        lambda net, h: h * (2.0 if torch.compiler.is_compiling() else 1.0),
    ],
)
def test_what_operators_do_not_tell_has_none(then: Then) -> None:
    net = Net(then)
    tensors = [TABLE, *OUTSIDE.buffers(), net.linear.bias]
    kept = [tensor.detach().clone() for tensor in tensors]
    assert fingerprint_of(net) is None
    assert all(map(torch.equal, kept, tensors))
    assert TABLE.tolist() == [1.0, 2.0, 3.0], "its values may leave PyTorch again"
    assert "tolist" not in vars(Tensor), "it is inherited again"
