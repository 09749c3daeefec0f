"""Optimizers: torch's on the host, and what a PEF has to know of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sambasim.errors import OptionError
from sambasim.options.training import OptimizerOptions
from sambasim.samba.optim import SGD, Adam, AdamW

PAIRS = [
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (Adam, torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
    (AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), nn.Parameter(torch.tensor([0.5]))]


def set_gradients(trained: list[nn.Parameter], scale: float = 1.0) -> None:
    for parameter in trained:
        parameter.grad = scale * parameter.detach() + 1


def test_options_are_those_of_each_group() -> None:
    one, two = parameters()
    groups = [{"params": [one], "weight_decay": 0.0}, {"params": [two], "lr": torch.tensor(0.5)}]
    assert AdamW(groups, lr=0.25, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, max_grad_norm=1.5).options() == (
        OptimizerOptions(name="adamw", lr=0.25, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.0, max_grad_norm=1.5),
        OptimizerOptions(name="adamw", lr=0.5, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, max_grad_norm=1.5),
    )


@pytest.mark.parametrize(("kind", "torchs", "given"), PAIRS)
def test_a_step_on_the_host_is_torchs(kind: Any, torchs: Any, given: dict[str, Any]) -> None:
    ours, plain = parameters(), parameters()
    optimizer, expected = kind(ours, **given), torchs(plain, **given)
    for _ in range(3):
        for trained, stepped in ((ours, optimizer), (plain, expected)):
            stepped.zero_grad()
            set_gradients(trained)
            stepped.step()
    assert all(a.equal(b) for a, b in zip(ours, plain, strict=True))


class HalvedAdamW(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class RenamedAdamW(AdamW):
    """Only its arguments are its own."""

    def __init__(self, trained: list[nn.Parameter]) -> None:
        super().__init__(trained, lr=0.5)


def test_a_step_of_the_apps_own_is_refused_because_a_device_would_not_take_it() -> None:
    optimizer = SGD(parameters(), lr=0.1, max_grad_norm=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)  # a session sends its rates
    assert optimizer.options()[0].lr == 0.1
    handle = optimizer.register_step_post_hook(lambda *given: None)
    with pytest.raises(OptionError, match=r"samba\.optim\.SGD has a step post hook, .*<lambda>"):
        optimizer.options()
    handle.remove()
    assert optimizer.options()
    with pytest.raises(OptionError, match=r"step of samba\.optim\.HalvedAdamW is not torch's, but HalvedAdamW\.step"):
        HalvedAdamW(parameters())
    assert RenamedAdamW(parameters()).options()[0].lr == 0.5


def clipped_by_hand(trained: list[nn.Parameter], bound: float) -> None:
    norm = torch.cat([p.grad for p in trained if p.grad is not None]).norm()
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad *= (bound / (norm + 1e-6)).clamp(max=1.0)


@pytest.mark.parametrize("scale", [100.0, 1e-3], ids=["above the bound", "below the bound"])
def test_a_step_on_the_host_clips_first(scale: float) -> None:
    ours, plain = parameters(), parameters()
    optimizer = SGD([{"params": [ours[0]]}, {"params": [ours[1]]}], lr=0.1, max_grad_norm=2.0)
    set_gradients(ours, scale)
    set_gradients(plain, scale)
    optimizer.step()
    clipped_by_hand(plain, 2.0)
    torch.optim.SGD(plain, lr=0.1).step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("kind", "torchs", "given"), PAIRS)
def test_a_checkpoint_may_be_of_torchs_optimizer(kind: Any, torchs: Any, given: dict[str, Any]) -> None:
    ours, plain = parameters(), parameters()
    trained = torchs(plain, **given)
    set_gradients(plain)
    trained.step()
    optimizer = kind(ours, max_grad_norm=3.0)
    optimizer.load_state_dict(trained.state_dict())
    assert optimizer.state_dict()["state"].keys() == trained.state_dict()["state"].keys()
    assert optimizer.options() == kind(parameters(), **given, max_grad_norm=3.0).options()
    trained.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (lambda p: Adam(p, amsgrad=True), "the optimizer of a PEF does not have amsgrad", "leave it out"),
        (lambda p: SGD(p, maximize=True), "the optimizer of a PEF does not have maximize", "leave it out, and let"),
        (
            lambda p: Adam(p, decoupled_weight_decay=True),
            "Adam with decoupled_weight_decay is AdamW", "samba.optim.AdamW",
        ),
        (
            lambda p: SGD([{"params": p[:1], "max_grad_norm": 2.0}, {"params": p[1:]}], max_grad_norm=1.0),
            "the parameter groups of SGD differ in max_grad_norm, 2.0 and 1.0, which bounds the norm of all",
            "give max_grad_norm to the optimizer and to no group",
        ),
    ],
)  # fmt: skip
def test_what_no_pef_can_do_is_refused(make: Callable[[list[nn.Parameter]], object], what: str, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"^{what}") as caught:
        make(parameters())
    assert str(caught.value.remedy).startswith(remedy)


class _Named:
    name = "mine"


def test_an_apps_own_subclass_keeps_its_constructor() -> None:
    class Mine(AdamW):
        def __init__(self, parameters: Any, rate: float) -> None:
            super().__init__(parameters, lr=rate)

    class Mixed(SGD, _Named):
        def __init__(self, parameters: Any, rate: float) -> None:
            super().__init__(parameters, lr=2 * rate)

    parameters = [nn.Parameter(torch.ones(2))]
    assert [one(parameters, 0.5).param_groups[0]["lr"] for one in (Mine, Mixed)] == [0.5, 1.0]
