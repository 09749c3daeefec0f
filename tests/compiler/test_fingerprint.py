"""The fingerprint of a step: equal for what compiles alike, another for whatever changes what is computed."""

# Calling a module gives Any, and parts of autograd are untyped.
# mypy: no-warn-return-any, allow-untyped-calls

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler import fingerprint as module
from sambasim.compiler.fingerprint import fingerprint
from sambasim.compiler.passes.optimizer import Update
from sambasim.compiler.step import forward_parameters
from tests.models import CASES, Case

SGD = Update("sgd", {"lr": 0.1, "momentum": 0.0})
TABLE = torch.tensor([1.0, 2.0, 3.0])
BATCH = 4


class Net(nn.Module):
    """A linear layer, whose outputs `then` makes into something, and their mean square."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor] = lambda net, h: torch.relu(h)) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.then = then
        self.mask = torch.tensor([1.0, 0.0, 1.0])
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.factor = 2.0
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        print("called")
        h = self.then(self, self.norm(self.linear(x)))
        return h.square().mean(), h


def told(net: nn.Module, updates: Sequence[Update] = (SGD,), **changed: Any) -> str | None:
    given = {"inputs": {"x": torch.ones(BATCH, 4)}, "updates": updates, "by_keyword": False, "dtype": "fp32"}
    return fingerprint(net, **{**given, **changed})


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


def without_gradient(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        other = torch.relu(h)
    return other + 0 * h


def with_gradient(net: Any, h: Tensor) -> Tensor:
    return torch.relu(h) + 0 * h


def hooked(net: Any, h: Tensor) -> Tensor:
    result = torch.relu(h)
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient * 2)
    return result


STEPS: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "relu": lambda net, h: torch.relu(h),
    "gelu": lambda net, h: functional.gelu(h),
    "gelu by tanh": lambda net, h: functional.gelu(h, approximate="tanh"),
    "a backward of its own": lambda net, h: Negated.apply(h),
    "a hook": hooked,
    "without gradient": without_gradient,
    "with gradient": with_gradient,
    "detached": lambda net, h: torch.relu(h.detach()) + 0 * h,
    "dropout": lambda net, h: net.dropout(torch.relu(h)),
    "a number": lambda net, h: torch.relu(h) * 2.0,
    "another number": lambda net, h: torch.relu(h) * 2.0000000000000004,
    "a table": lambda net, h: torch.relu(h) * TABLE,
    "another table": lambda net, h: torch.relu(h) * (TABLE + 1),
    "made on the spot": lambda net, h: torch.relu(h) * torch.tensor([1.0, 2.0, 4.0]),
    "the mask": lambda net, h: torch.relu(h) * net.mask,
    "the wrong way round": lambda net, h: torch.relu(h) - net.mask,
    "and so": lambda net, h: net.mask - torch.relu(h),
}


def test_what_computes_otherwise_has_another_fingerprint() -> None:
    found = {name: told(Net(then)) for name, then in STEPS.items()}
    assert None not in found.values()
    assert len(set(found.values())) == len(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_it_is_the_same_each_time_whatever_the_weights_and_the_inputs_are(name: str) -> None:
    assert told(Net(STEPS[name])) == told(Net(STEPS[name]), inputs={"x": torch.randn(BATCH, 4)})


def test_what_is_called_otherwise_and_computes_the_same_is_the_same() -> None:
    renamed = Net(lambda net, h: net.activation(h))
    renamed.activation = nn.ReLU()
    assert told(renamed) == told(Net())


def _changed(change: Callable[[Any], object]) -> str | None:
    net = Net(STEPS["the mask"])
    change(net)
    return told(net)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.linear.weight.requires_grad_(False),
        lambda net: net.norm.eval(),
        lambda net: setattr(net.norm, "eps", 1e-3),
        lambda net: setattr(net.norm, "momentum", 0.2),
        lambda net: net.mask.__setitem__(0, 3.0),
        lambda net: net.table.__setitem__(0, 3.0),
        lambda net: net.register_buffer("table", torch.ones(3)),
        lambda net: net.register_parameter("spare", nn.Parameter(torch.ones(3))),
        lambda net: setattr(net.norm, "bias", net.linear.bias),
        lambda net: setattr(net.linear, "bias", None),
        lambda net: setattr(net, "linear", nn.Sequential(net.linear)),
        lambda net: setattr(net, "mask", net.mask.double()),
        lambda net: setattr(net, "__class__", type("Other", (Net,), {})),
    ],
)
def test_a_model_that_was_changed_has_another(change: Callable[[Any], object]) -> None:
    before = _changed(lambda net: None)
    assert before is not None
    assert _changed(change) not in (None, before)


@pytest.mark.parametrize(
    "changed",
    [
        {"inputs": {"x": torch.randn(BATCH + 1, 4)}},
        {"inputs": {"y": torch.randn(BATCH, 4)}},
        {"inputs": {"x": torch.randn(BATCH, 4, dtype=torch.bfloat16)}, "dtype": "bf16"},
        {"by_keyword": True},
        {"dtype": "bf16"},
        {"updates": ()},
        {"updates": (Update("sgd", {"lr": 0.1, "momentum": 0.9}),)},
        {"updates": (Update("adam", {"lr": 0.1, "momentum": 0.0}),)},
        {"updates": (Update("sgd", {"lr": 0.1, "momentum": 0.0, "max_grad_norm": 1.0}),)},
        {"updates": (Update("sgd", {"lr": 0.1, "momentum": 0.0}, frozenset({"linear.weight"})),)},
        {"updates": (SGD, SGD)},
    ],
)
def test_another_way_to_compile_has_another(changed: dict[str, Any]) -> None:
    other = told(Net(), **changed)
    assert other != told(Net())
    assert other is not None or "y" in changed.get("inputs", {}) or changed.get("by_keyword")


def test_hyperparameters_may_differ_in_value() -> None:
    assert told(Net(), [Update("sgd", {"lr": 0.2, "momentum": 0.0})]) == told(Net())


def test_the_model_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net(STEPS["dropout"]).eval()  # its training mode is entered, and left again
    net.dropout.train()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    attributes, parameters = dict(vars(net)), [id(parameter) for parameter in net.parameters()]
    generators = torch.get_rng_state(), random.getstate()
    assert told(net) is not None
    assert capsys.readouterr().out == ""
    assert vars(net) == attributes
    assert [id(parameter) for parameter in net.parameters()] == parameters
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [net.training, net.norm.training, net.dropout.training] == [False, False, True]
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]


def test_a_step_that_fails_or_is_too_large_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(net: Any, h: Tensor) -> Tensor:
        raise RuntimeError("not today")

    assert told(Net(fails)) is None
    monkeypatch.setattr(module, "_MOST_BYTES", 100)
    assert told(Net()) is None


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_every_family_of_models_has_one_of_its_own(one: Case) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = one.build()
        batch = one.batch(BATCH, seed=seed)
        inputs = batch if isinstance(batch, dict) else dict(zip(forward_parameters(model), batch, strict=False))
        found.append(fingerprint(model, inputs, (SGD,), by_keyword=isinstance(batch, dict), dtype="fp32"))
    assert found[0] == found[1]
    assert found[0] is not None
