"""Runs in which the device trains nothing, in one process."""

import pytest
import torch
from torch import nn

from sambasim import samba
from sambasim.samba.checks import untrained
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.ones(2, 3)]


def _made() -> tuple[nn.Module, samba.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1))
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = _made()
    config = {"output_folder": str(tmp_path_factory.mktemp("out"))}
    return session.compile(model, BATCH, optimizer, "net", config_dict=config)


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    telling = Telling(on_demand=True)
    monkeypatch.setattr(untrained, "telling", telling)
    return telling


def _loaded(pef: str) -> tuple[nn.Module, samba.optim.SGD]:
    model, optimizer = _made()
    trace_graph(model, BATCH, optimizer, pef=pef)
    return model, optimizer


def _train_on_host(model: nn.Module, optimizer: samba.optim.SGD) -> None:
    model(*BATCH).mean().backward()
    optimizer.step()


def test_backwards_without_an_optimizer_step_are_found_once(pef: str, telling: Telling) -> None:
    model, optimizer = _loaded(pef)
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
        optimizer.step()
        session.to_cpu(model)
    (finding,) = telling.findings
    assert finding.words == "AP07: the device has run 1 backward and no optimizer step, so that nothing is trained"
    assert "session.to_cpu(model)" in str(finding.where)


def test_they_are_found_without_a_fetch_after_many(pef: str, telling: Telling) -> None:
    _loaded(pef)
    for _ in range(256):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    assert [finding.code for finding in telling.findings] == ["AP07"]


def test_what_the_host_has_trained_and_a_fetch_replaces_is_found(pef: str, telling: Telling) -> None:
    model, optimizer = _loaded(pef)
    _train_on_host(model, optimizer)
    session.to_cpu(model)
    (finding,) = telling.findings
    assert finding.words.startswith(
        "AP07: to_cpu replaces weights that the app has trained on the host, and the device"
    )


def test_what_is_trained_is_not(pef: str, telling: Telling) -> None:
    model, optimizer = _loaded(pef)
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    session.run(section_types=["OPT"])
    session.to_cpu(model)
    session.run(BATCH)
    _train_on_host(model, optimizer)  # beside the device
    session.to_cpu(model)
    session.run(BATCH, section_types=["FWD"])
    session.to_cpu(model)
    assert not telling.findings
