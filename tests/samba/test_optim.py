"""Optimizers: torch's on the host, and what a PEF has to know of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sambasim.errors import OptionError
from sambasim.options.training import OptimizerOptions
from sambasim.samba.optim import SGD, Adam, AdamW


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), nn.Parameter(torch.tensor([0.5]))]


def set_gradients(trained: list[nn.Parameter], scale: float = 1.0) -> None:
    for parameter in trained:
        parameter.grad = scale * parameter.detach() + 1


def test_options_are_those_of_each_group() -> None:
    first, second = parameters()
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": [second], "lr": torch.tensor(0.5)}]
    assert AdamW(groups, lr=0.25, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, max_grad_norm=1.5).options() == (
        OptimizerOptions(name="adamw", lr=0.25, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.0, max_grad_norm=1.5),
        OptimizerOptions(name="adamw", lr=0.5, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, max_grad_norm=1.5),
    )


@pytest.mark.parametrize(
    ("kind", "torchs", "given"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (Adam, torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
        (AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    ],
)
def test_a_step_and_a_checkpoint_are_those_of_torchs_optimizer(kind: Any, torchs: Any, given: dict[str, Any]) -> None:
    ours, plain = parameters(), parameters()
    optimizer, expected = kind(ours, **given), torchs(plain, **given)
    for _ in range(3):
        for trained, stepped in ((ours, optimizer), (plain, expected)):
            stepped.zero_grad()
            set_gradients(trained)
            stepped.step()
    assert all(map(torch.equal, ours, plain))
    optimizer = kind(parameters(), max_grad_norm=3.0)
    optimizer.load_state_dict(expected.state_dict())
    assert optimizer.state_dict()["state"].keys() == expected.state_dict()["state"].keys()
    assert optimizer.options() == kind(parameters(), **given, max_grad_norm=3.0).options()
    expected.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("scale", [100.0, 1e-3], ids=["above the bound", "below the bound"])
def test_a_step_on_the_host_clips_first(scale: float) -> None:
    ours, plain = parameters(), parameters()
    optimizer = SGD([{"params": [ours[0]]}, {"params": [ours[1]]}], lr=0.1, max_grad_norm=2.0)
    set_gradients(ours, scale)
    set_gradients(plain, scale)
    optimizer.step()
    gradients = [parameter.grad for parameter in plain if parameter.grad is not None]
    norm = torch.cat(gradients).norm()
    for gradient in gradients:
        gradient *= (2.0 / (norm + 1e-6)).clamp(max=1.0)
    torch.optim.SGD(plain, lr=0.1).step()
    torch.testing.assert_close(ours, plain)


class RenamedSGD(SGD):
    """Only its arguments are its own."""

    def __init__(self, trained: list[nn.Parameter], rate: float) -> None:
        super().__init__(trained, lr=2 * rate)


def test_a_step_of_the_apps_own_is_refused_because_a_device_would_not_take_it() -> None:
    optimizer = SGD(parameters(), lr=0.1, max_grad_norm=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)  # a session sends its rates
    assert optimizer.options()[0].lr == 0.1
    handle = optimizer.register_step_post_hook(lambda *given: None)
    with pytest.raises(OptionError, match=r"samba\.optim\.SGD has a step post hook, .*<lambda>"):
        optimizer.options()
    handle.remove()
    assert optimizer.options()
    assert RenamedSGD(parameters(), 0.25).options()[0].lr == 0.5


def two_bounds(p: list[nn.Parameter]) -> SGD:
    groups: list[dict[str, Any]] = [{"params": p[:1], "max_grad_norm": 2.0}, {"params": p[1:]}]
    return SGD(groups, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (lambda p: SGD(p, differentiable=True), "the optimizer of a PEF does not have differentiable", "leave it out"),
        (lambda p: Adam(p, decoupled_weight_decay=True), "Adam with decoupled_weight_decay is", "samba.optim.AdamW"),
        (two_bounds, "the parameter groups of SGD differ in max_grad_norm, 2.0 and 1.0, which", "give max_grad_norm"),
    ],
)  # fmt: skip
def test_what_no_pef_can_do_is_refused(make: Callable[[list[nn.Parameter]], object], what: str, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"^{what}") as caught:
        make(parameters())
    assert str(caught.value.remedy).startswith(remedy)
