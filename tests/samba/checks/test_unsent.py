"""Weights and states that the host changes once the device has them, in one process."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.samba.checks import unsent
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import App


def test_state_that_is_loaded_late_is_found_once(app: App) -> None:
    app.step()
    samba.session.to_cpu(app.model)
    saved = copy.deepcopy(app.optimizer.state_dict())
    app.step()
    samba.session.to_cpu(app.model)
    for _ in range(2):
        app.optimizer.load_state_dict(saved)
        app.step()
    assert app.told == [
        "AP05: the app has loaded the state of an optimizer, and the device goes on with its own",
    ]


def test_state_that_the_device_has_already_is_not(app: App) -> None:
    app.step()
    samba.session.to_cpu(app.model)
    app.optimizer.load_state_dict(copy.deepcopy(app.optimizer.state_dict()))
    app.step()
    assert app.told == []


def test_state_that_is_sent_is_not(app: App) -> None:
    app.step()
    samba.session.to_cpu(app.model)
    app.optimizer.load_state_dict(app.optimizer.state_dict())
    samba.session.to_device(app.model)
    app.step()
    assert app.told == []


def test_a_step_of_the_host_that_finds_no_gradients_hides_nothing(app: App) -> None:
    app.step()
    app.optimizer.step()
    with torch.no_grad():
        next(app.model.parameters()).fill_(2.0)
    app.step()
    assert [words.partition(":")[0] for words in app.told] == ["AP05"]


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


def _copy_beside_autograd(model: nn.Module) -> None:
    weight = model.get_parameter("0.weight")
    weight.data.copy_(torch.zeros(weight.shape))


@pytest.mark.parametrize("change", [_load, _copy_beside_autograd], ids=lambda one: one.__name__)
def test_weights_that_are_not_sent_are_found(app: App, change: Callable[[nn.Module], None]) -> None:
    change(app.model)
    app.step()
    app.step()
    assert app.told == [
        "AP05: the app has changed weights of the model, 0.weight first, and the device goes on with its own"
    ]


def _load_and_send(app: App) -> None:
    app.model.load_state_dict(app.model.state_dict())
    samba.session.to_device(app.model)


def _fetch(app: App) -> None:
    app.step()
    samba.session.to_cpu(app.model)


def _train_on_the_host(app: App) -> None:
    app.model(torch.ones(2, 3)).mean().backward()
    app.optimizer.step()
    app.optimizer.zero_grad()


def _swap_and_swap_back(app: App) -> None:
    _fetch(app)
    kept = {name: value.clone() for name, value in app.model.state_dict().items()}
    app.model.load_state_dict({name: value * 2 for name, value in kept.items()})
    app.model.load_state_dict(kept)


def _share(app: App) -> None:
    app.model.share_memory()


@pytest.mark.parametrize(
    "exchange", [_load_and_send, _fetch, _train_on_the_host, _swap_and_swap_back, _share], ids=lambda one: one.__name__
)
def test_weights_that_the_device_has_or_that_the_host_trains_are_no_finding(
    app: App, exchange: Callable[[App], None]
) -> None:
    app.step()
    exchange(app)
    for _ in range(8):
        app.step()
    assert app.told == []


def test_what_was_loaded_before_is_gone(app: App, app_pef: str) -> None:
    before = weakref.ref(session._loaded().machine.replica)
    trace_graph(app.model, [torch.ones(2, 3)], app.optimizer, pef=app_pef)
    gc.collect()
    assert before() is None


class Unused(nn.Module):
    """With a layer that forward() leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).mean()  # type: ignore[no-any-return]  # torch's modules return anything


def test_a_parameter_without_a_gradient_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(unsent, "telling", told)
    model = Unused()
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    inputs = [torch.ones(2, 3)]
    pef = session.compile(model, inputs, optimizer, "net", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, inputs, optimizer, pef=pef)
    session.run(inputs)
    assert told.findings == ()


def test_weights_that_come_too_late_are_found_in_predictions_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(unsent, "telling", told)
    with torch.inference_mode():
        frozen = nn.Linear(3, 1)  # whose tensors count no writes
    samba.from_torch_model_(frozen)
    config = {"output_folder": str(tmp_path), "inference": True}
    pef = session.compile(frozen, [torch.ones(2, 3)], None, "net", config_dict=config)
    trace_graph(frozen, [torch.ones(2, 3)], None, pef=pef)
    model = nn.Linear(3, 1)
    samba.from_torch_model_(model)
    trace_graph(model, [torch.ones(2, 3)], None, pef=pef)
    session.run([torch.ones(2, 3)])
    nn.init.zeros_(model.weight)
    session.run([torch.ones(2, 3)])
    (finding,) = told.findings
    assert finding.what.startswith("the app has changed weights of the model, weight first")


def test_freezing_what_only_predicts_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(unsent, "telling", told)
    model = nn.Linear(3, 1)
    samba.from_torch_model_(model)
    inputs = [torch.ones(2, 3)]
    config = {"output_folder": str(tmp_path), "inference": True}
    pef = session.compile(model, inputs, None, "net", config_dict=config)
    trace_graph(model, inputs, None, pef=pef)
    model.requires_grad_(False)
    session.run(inputs)
    assert told.findings == ()


@pytest.mark.parametrize(
    ("layer", "parameter", "words"),
    [
        (1, "weight", "requires_grad of 1.weight is False now, and on the device still True"),
        (0, "bias", "requires_grad of 0.bias is True now, and on the device still False"),
    ],
)
def test_what_is_frozen_or_trained_too_late_is_found(app: App, layer: int, parameter: str, words: str) -> None:
    getattr(app.model[layer], parameter).requires_grad_(parameter == "bias")
    app.step()
    assert app.told == [f"AP05: {words}"]
