"""Hyperparameters that the host changes once the device has them, in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.samba import context
from sambasim.samba.checks import unsent
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import App, made


def test_one_value_for_groups_that_differ_is_found_once(app: App) -> None:
    app.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.01})
    for _ in range(2):
        app.step(lr=0.1)
    assert app.told == ["AP05: groups of parameters differ in lr: 0.1, 0.01; and session.run sets 0.1 for all of them"]


def test_a_hyperparameter_that_another_optimizer_lacks_is_no_difference(app: App) -> None:
    groups = [[0.1, None, *[None] * 6], [0.1, 0.9, *[None] * 6]]  # of AdamW and SGD, lr and momentum first
    found = unsent.Unsent(session._loaded().machine)
    found._compare_groups(groups, {"lr": 0.1, "momentum": 0.9})
    assert app.told == []
    found._compare_groups([groups[0], [0.2, *groups[1][1:]]], {"lr": 0.1})
    assert len(app.told) == 1


def test_a_rate_that_comes_back_and_is_not_handed_on_is_found(app: App) -> None:
    app.optimizer.param_groups[0]["lr"] = 0.01
    app.step(lr=0.01)
    app.optimizer.param_groups[0]["lr"] = 0.1  # that of trace_graph
    for _ in range(4):
        app.step()
    assert app.told == [
        "AP05: the app has changed lr of an optimizer from 0.01 to 0.1, and the device goes on with 0.01"
    ]


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_scheduler_that_the_device_is_not_told_of_is_found_once(app: App) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(app.optimizer, 0.5)
    for _ in range(3):
        app.step()
        scheduler.step()
    assert app.told == [
        "AP05: the app has changed lr of an optimizer from 0.1 to 0.05, and the device goes on with 0.1"
    ]
    (finding,) = app.telling.findings
    assert finding.remedy == 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
    assert finding.where is not None
    assert "session.run(" in finding.where


def test_a_scheduler_whose_rate_is_handed_on_is_no_finding(app: App) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(app.optimizer, lambda step: 1 / (step + 2))
    for _ in range(3):
        app.step(lr=float(scheduler.get_last_lr()[0]))
        scheduler.step()
    app.step()  # what it was told last holds on, and the app knows how to tell it
    assert app.told == []


def test_a_scheduler_beside_a_rate_that_is_handed_on_and_never_changes_is_found(app: App) -> None:
    scheduler = torch.optim.lr_scheduler.MultiStepLR(app.optimizer, [2], 0.5)
    for _ in range(6):
        app.step(lr=0.2)
        scheduler.step()
    assert app.told == [
        "AP05: the app has changed lr of an optimizer from 0.1 to 0.05, and the device goes on with 0.2"
    ]


@pytest.mark.parametrize("late", [1, 2])
def test_a_rate_that_is_handed_on_late_is_no_finding(app: App, late: int) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(app.optimizer, 0.5)
    rates = [0.1] * late
    for _ in range(6):
        rates.append(float(scheduler.get_last_lr()[0]))
        app.step(lr=rates[-1 - late])
        scheduler.step()
    assert app.told == []


def test_a_rate_of_an_epoch_that_is_handed_on_is_no_finding(app: App) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(app.optimizer, 0.5)
    for _ in range(6):
        for _ in range(3):
            app.step(lr=float(scheduler.get_last_lr()[0]))
        scheduler.step()
    assert app.told == []


def test_a_rate_that_is_changed_before_sections_without_an_optimizer_is_no_finding(app: App) -> None:
    app.optimizer.param_groups[0]["lr"] = 0.01
    app.step("FWD")
    app.step("BCKWD")
    assert app.told == []
    app.step("GRADNORM", "OPT")
    assert len(app.told) == 1


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("weight_decay", 0.2, 'session.run(…, hyperparam_dict={"weight_decay": …}), or change it before trace_graph'),
        ("max_grad_norm", None, "set it where the optimizer is made, and compile the app again"),
    ],
)
def test_what_to_do_can_be_done(app: App, option: str, value: object, remedy: str) -> None:
    app.optimizer.param_groups[0][option] = value
    app.step()
    (finding,) = app.telling.findings
    assert str(finding.remedy).startswith(remedy)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("lr", 0.01, "change lr before trace_graph: hyperparam_dict sets one value for all groups of parameters"),
        ("momentum", 0.9, "set it where the optimizer is made, and compile the app again: the PEF has no other"),
        ("max_grad_norm", 1.0, "set it where the optimizer is made, and compile the app again: the PEF has no other"),
    ],
)
def test_what_groups_and_missing_states_allow_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: float, remedy: str
) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(unsent, "telling", told)
    model = made()[0]
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = samba.optim.SGD(groups, lr=0.1)
    inputs = [torch.ones(2, 3)]
    pef = session.compile(model, inputs, optimizer, "net", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, inputs, optimizer, pef=pef)
    optimizer.param_groups[0][option] = value
    session.run(inputs)
    (finding,) = told.findings
    assert finding.remedy == remedy


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("betas", (0.5, 0.999), "beta1 of an optimizer from 0.9 to 0.5"),
        ("weight_decay", 0, "weight_decay of an optimizer from 0.01 to 0"),
        ("max_grad_norm", 2.0, "max_grad_norm of an optimizer from 1 to 2"),
        ("lr", torch.tensor(0.25), "lr of an optimizer from 0.1 to 0.25"),
    ],
)
def test_every_hyperparameter_is_looked_at(app: App, option: str, value: object, words: str) -> None:
    app.optimizer.param_groups[0][option] = value
    app.step()
    (told,) = app.told
    assert words in told


@pytest.mark.parametrize("kind", [tuple, list])
def test_betas_that_are_changed_in_place_are_found(app: App, kind: Callable[[list[Tensor]], object]) -> None:
    betas = [torch.tensor(0.9), torch.tensor(0.999)]
    app.optimizer.param_groups[0]["betas"] = given = kind(betas)
    app.step()
    assert app.told == [], "they are the same numbers"
    betas[0].fill_(0.5)
    if isinstance(given, list):
        given[0] = 0.5
    app.step()
    assert app.told == [
        "AP05: the app has changed beta1 of an optimizer from 0.9 to 0.5, and the device goes on with 0.9"
    ]


def test_hyperparameters_of_a_checkpoint_that_comes_too_late_are_found(app: App) -> None:
    state = app.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.01
    app.optimizer.load_state_dict(state)
    app.step()
    assert [words.partition(" from")[0] for words in app.told] == ["AP05: the app has changed lr of an optimizer"]


def test_a_tensor_of_the_same_number_is_no_change(app: App) -> None:
    app.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    app.step()
    assert app.told == []


def test_a_test_of_the_app_may_train_on_the_host(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.current(), "command", "test")
    app.optimizer.param_groups[0]["lr"] = 0.2
    app.step()
    assert app.told == []
