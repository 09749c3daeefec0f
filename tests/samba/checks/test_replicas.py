"""What a loaded PEF is asked before it runs sections, in one process: what is looked at, and when."""

from argparse import Namespace

import pytest
import torch
from torch import nn

from sambasim import samba
from sambasim.samba import context
from sambasim.samba.checks import sync, weights
from sambasim.samba.checks.telling import Telling
from sambasim.samba.checks.weights import Trained
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = _made()
    config = {"output_folder": str(tmp_path_factory.mktemp("out"))}
    return session.compile(model, [torch.zeros(2, 3)], optimizer, "net", config_dict=config)


def _made() -> tuple[nn.Module, samba.optim.SGD]:
    model = nn.Linear(3, 1)
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _loaded(pef: str) -> nn.Module:
    model, optimizer = _made()
    trace_graph(model, [torch.zeros(2, 3)], optimizer, pef=pef)
    return model


@pytest.mark.parametrize(("command", "codes"), [("run", ["DP02"]), (None, ["DP02"]), ("measure-performance", [])])
def test_accumulation_is_not_looked_for_where_whole_steps_are_measured(
    pef: str, monkeypatch: pytest.MonkeyPatch, command: str | None, codes: list[str]
) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(sync, "telling", told)
    of_process = context.current()
    monkeypatch.setattr(of_process, "command", command)
    monkeypatch.setattr(of_process, "arguments", Namespace(command=command, grad_accumulation_steps=2))
    _loaded(pef)
    session.run([torch.zeros(2, 3)])
    assert [finding.code for finding in told.findings] == codes


def test_the_hyperparameters_of_the_device_are_compared(pef: str) -> None:
    model = _loaded(pef)
    machine = session._loaded(model).machine
    compared = []
    for hyperparameters in ({"lr": 0.1, "momentum": 0.5}, {"lr": 0.2}, None, {"momentum": 0.5}):
        session.run([torch.zeros(2, 3)], hyperparam_dict=hyperparameters)
        machine.optimizers[0].param_groups[0]["lr"] = 0.3  # which the device does not see
        (of_one,) = weights.trained(machine).hyperparameters
        compared.append((of_one["lr"], of_one["momentum"]))
    assert compared == [(0.1, 0.5), (0.2, 0.5), (0.2, 0.5), (0.2, 0.5)]


@pytest.mark.parametrize(("step", "digests"), [(8, 1), (9, 0)])
def test_weights_are_read_before_they_are_replaced_only_in_steps_that_are_looked_at(
    pef: str, monkeypatch: pytest.MonkeyPatch, step: int, digests: int
) -> None:
    read: list[int] = []

    def trained(*_: object) -> Trained:
        read.append(step)
        return Trained({}, step, [])

    monkeypatch.setattr(weights, "trained", trained)
    model = _loaded(pef)
    checks = session._loaded(model).checks
    monkeypatch.setattr(checks, "_shared", True)
    monkeypatch.setattr(checks, "_step", step)
    session.to_device(model)
    session.to_device(model)
    assert len(read) == digests
