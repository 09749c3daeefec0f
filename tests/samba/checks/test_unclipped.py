"""Gradients that the app clips on the host, in one process."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from sambasim import samba
from sambasim.samba.checks import unclipped
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.ones(2, 3)]


def _made(max_grad_norm: float | None) -> tuple[nn.Module, samba.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1))
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=max_grad_norm)


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    telling = Telling(on_demand=True)
    monkeypatch.setattr(unclipped, "telling", telling)
    return telling


def _loaded(folder: object, max_grad_norm: float | None = None) -> tuple[nn.Module, samba.optim.SGD]:
    model, optimizer = _made(max_grad_norm)
    pef = session.compile(model, BATCH, optimizer, "net", config_dict={"output_folder": str(folder)})
    trace_graph(model, BATCH, optimizer, pef=pef)
    return model, optimizer


def test_clipping_where_there_are_no_gradients_is_found_once(telling: Telling, tmp_path: object) -> None:
    model, _ = _loaded(tmp_path)
    for _ in range(2):
        session.run(BATCH)
        clip_grad_norm_(model.parameters(), 0.5)
    (finding,) = telling.findings
    assert finding.words == "AP05: the app clips gradients on the host, and the device does not"
    assert "clip_grad_norm_(model.parameters(), 0.5)" in str(finding.where)
    assert finding.remedy.startswith("samba.optim.SGD(…, max_grad_norm=0.5), a bound of the 2-norm of all gradients")


def test_clipping_that_has_an_effect_or_need_not_have_one_is_not(telling: Telling, tmp_path: object) -> None:
    model, optimizer = _loaded(tmp_path, max_grad_norm=0.5)
    session.run(BATCH)
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    model, _ = _loaded(tmp_path)
    clip_grad_norm_(nn.Linear(3, 1).parameters(), 0.5)
    clip_grad_norm_(model.parameters(), float("inf"))
    model(*BATCH).mean().backward()
    before = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    clip_grad_norm_(model.parameters(), 0.5)
    after = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert all(new < old for new, old in zip(after, before, strict=True)), "it clips as before"
    assert not telling.findings
