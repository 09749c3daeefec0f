"""AP05: changes on the host that the device does not get, in one process."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.nn.utils import clip_grad_norm_ as by_another_name

from sambasim import samba
from sambasim.samba import process
from sambasim.samba.process import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import BATCH, train_on_host
from tests.samba.harness import Load, Made, compiled


@dataclass
class App:
    """A model with its optimizer, whose PEF is loaded, and its findings."""

    model: nn.Sequential
    optimizer: samba.optim.AdamW
    reporter: Reporter

    def step(self, *section_types: str, **hyperparameters: float) -> None:
        session.run(BATCH, hyperparam_dict=hyperparameters or None, section_types=section_types or None)

    @property
    def changes(self) -> list[str]:
        return [finding.words for finding in self.reporter.findings if finding.code == "AP05"]


def _adam() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Flatten(0))
    samba.from_torch_model_(model)
    model[0].bias.requires_grad_(False)
    return model, samba.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)


@pytest.fixture
def app(load: Load, reporter: Reporter) -> App:
    return App(*load(_adam, BATCH), reporter)


def test_state_that_is_loaded_late_is_found_once(app: App) -> None:
    app.step()
    samba.session.to_cpu(app.model)
    saved = copy.deepcopy(app.optimizer.state_dict())
    app.optimizer.load_state_dict(copy.deepcopy(saved))  # which the device has already
    app.step()
    app.optimizer.load_state_dict(app.optimizer.state_dict())
    samba.session.to_device(app.model)
    app.step()
    assert app.changes == []
    samba.session.to_cpu(app.model)
    for _ in range(2):
        app.optimizer.load_state_dict(saved)
        app.step()
    assert app.changes == ["AP05: the app has loaded the state of an optimizer, and the device continues with its own"]


def test_weights_that_are_not_sent_in_training_are_found(app: App) -> None:
    app.model.load_state_dict({name: torch.zeros_like(value) for name, value in app.model.state_dict().items()})
    app.step()
    app.step()
    (change,) = app.changes
    assert change.startswith("AP05: the app has changed weights of the model, first 0.weight, and the device")


def _fetch(app: App) -> None:
    app.step()
    samba.session.to_cpu(app.model)


def _swap_and_swap_back(app: App) -> None:
    _fetch(app)
    kept = {name: value.clone() for name, value in app.model.state_dict().items()}
    app.model.load_state_dict({name: value * 2 for name, value in kept.items()})
    app.model.load_state_dict(kept)


@pytest.mark.parametrize("exchange", [_fetch, lambda app: train_on_host(app.model, app.optimizer), _swap_and_swap_back])
def test_weights_of_the_device_or_trained_on_the_host_are_no_finding(app: App, exchange: Callable[[App], None]) -> None:
    app.step()
    exchange(app)
    for _ in range(8):
        app.step()
    assert app.changes == []


def test_weights_that_are_not_sent_are_found(tmp_path: Path, reporter: Reporter) -> None:
    model = samba.from_torch_model_(nn.Linear(3, 1))
    trace_graph(model, BATCH, None, pef=compiled((model, None), BATCH, tmp_path, inference=True))
    session.run(BATCH)
    model.requires_grad_(False)
    session.run(BATCH)
    assert len(reporter.findings) == 0
    nn.init.zeros_(model.weight)
    for _ in range(6):
        session.run(BATCH)
    (finding,) = reporter.findings
    assert finding.what.startswith("the app has changed weights of the model, first weight")


@pytest.mark.parametrize(
    ("layer", "parameter", "words"),
    [
        (1, "weight", "requires_grad of 1.weight is False now, and still True on the device"),
        (0, "bias", "requires_grad of 0.bias is True now, and still False on the device"),
    ],
)
def test_a_late_change_of_requires_grad_is_found(app: App, layer: int, parameter: str, words: str) -> None:
    getattr(app.model[layer], parameter).requires_grad_(parameter == "bias")
    app.step()
    assert app.changes == [f"AP05: {words}"]


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_scheduler_whose_rate_is_not_passed_is_found_once(app: App) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(app.optimizer, 0.5)
    for _ in range(3):
        app.step()
        scheduler.step()
    assert app.changes == [
        "AP05: the app has changed lr of an optimizer from 0.1 to 0.05, and the device continues with 0.1"
    ]
    (finding,) = app.reporter.findings
    assert finding.remedy == 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
    assert finding.where is not None
    assert "session.run(" in finding.where


@pytest.mark.parametrize("late", [0, 2])
def test_a_scheduler_whose_rate_is_passed_also_two_steps_late_is_no_finding(app: App, late: int) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(app.optimizer, 0.5)
    rates = [0.1] * late
    for _ in range(6):
        rates.append(float(scheduler.get_last_lr()[0]))
        app.step(lr=rates[-1 - late])
        scheduler.step()
    app.step()  # with the rate of the last call
    assert app.changes == []


def test_a_rate_that_is_changed_before_sections_without_an_optimizer_is_no_finding(app: App) -> None:
    app.optimizer.param_groups[0]["lr"] = 0.01
    process.current().command = "test"  # which may train on the host
    app.step()
    process.current().command = None
    app.step("FWD")
    app.step("BCKWD")
    assert app.changes == []
    app.step("GRADNORM", "OPT")
    assert len(app.changes) == 1


@pytest.mark.parametrize(
    ("option", "value", "words", "remedy"),
    [
        ("weight_decay", 0.2, "weight_decay of", 'hyperparam_dict={"weight_decay": …}), or change it before'),
        ("max_grad_norm", None, "from 1 to None", "set it where the optimizer is made, and compile the app again"),
        ("betas", (0.5, 0.999), "beta1 of an optimizer from 0.9 to 0.5", 'hyperparam_dict={"beta1": …})'),
        ("lr", torch.tensor(0.25), "lr of an optimizer from 0.1 to 0.25", "scheduler.get_last_lr()[0]"),
    ],
)  # fmt: skip
def test_every_hyperparameter_is_compared(app: App, option: str, value: object, words: str, remedy: str) -> None:
    app.optimizer.param_groups[0][option] = value
    app.step()
    (finding,) = app.reporter.findings
    assert words in finding.what
    assert remedy in finding.remedy


ANY_BOUND = "samba.optim.SGD(…, max_grad_norm=…), a bound of the 2-norm of all gradients together; then compile"


@pytest.mark.parametrize(
    ("clip", "remedy"),
    [
        (lambda all_, _: by_another_name(parameters=all_, max_norm=0.5), ANY_BOUND.replace("=…", "=0.5")),
        (lambda all_, _: clip_grads_with_norm_(all_, 0.5, torch.tensor(1.0)), ANY_BOUND),
        (lambda all_, _: nn.utils.clip_grad_value_(all_, clip_value=0.5), ANY_BOUND),
    ],
    ids=["name", "with-norm", "value"],
)
def test_every_function_that_clips_is_found(
    reporter: Reporter, linear: Made, clip: Callable[[list[nn.Parameter], Tensor], object], remedy: str
) -> None:
    model, _ = linear
    session.run(BATCH)
    trained = list(model.parameters())
    for _ in range(2):
        with contextlib.suppress(RuntimeError):  # clip_grad_value_ of torch itself fails where there are no gradients
            clip(trained, trained[0])
    (finding,) = reporter.findings
    assert finding.words == "AP05: the app clips gradients on the host, and the device does not"
    assert str(finding.where).startswith(__file__)
    assert finding.remedy.startswith(remedy)


def test_clipping_with_an_effect_or_of_others_is_no_finding(app: App, reporter: Reporter, linear: Made) -> None:
    app.step()
    clip_grad_norm_(app.model.parameters(), 0.5)  # which the device does too
    model, _ = linear
    clip_grad_norm_(nn.Linear(3, 1).parameters(), 0.5)
    clip_grad_norm_(model.parameters(), float("inf"))
    process.current().command = "test"
    clip_grad_norm_(model.parameters(), 0.5)
    process.current().command = None
    model(*BATCH).mean().backward()
    before = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    clip_grad_norm_(model.parameters(), 0.5)
    after = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert all(new < old for new, old in zip(after, before, strict=True)), "it clips as before"
    assert not reporter.findings
