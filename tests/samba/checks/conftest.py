"""Apps whose PEF is in the session: one with what the checks of what it leaves unsent tell it, and one that the device
has trained."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.samba.checks import unsent
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.ones(2, 3)]


@dataclass
class App:
    """A model with its optimizer, whose PEF is in the session, and what it was told."""

    model: nn.Sequential
    optimizer: samba.optim.AdamW
    telling: Telling

    def step(self, *section_types: str, **hyperparameters: float) -> None:
        kinds = section_types or None
        session.run([torch.ones(2, 3)], hyperparam_dict=hyperparameters or None, section_types=kinds)

    @property
    def told(self) -> list[str]:
        return [finding.words for finding in self.telling.findings]


def made() -> tuple[nn.Sequential, samba.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    samba.from_torch_model_(model)
    model[0].bias.requires_grad_(False)
    return model, samba.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)


@pytest.fixture(scope="module")
def app_pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = made()
    config = {"output_folder": str(tmp_path_factory.mktemp("out"))}
    return session.compile(model, [torch.ones(2, 3)], optimizer, "net", config_dict=config)


@pytest.fixture
def app(app_pef: str, monkeypatch: pytest.MonkeyPatch) -> App:
    telling = Telling(on_demand=True)
    monkeypatch.setattr(unsent, "telling", telling)
    model, optimizer = made()
    trace_graph(model, [torch.ones(2, 3)], optimizer, pef=app_pef)
    return App(model, optimizer, telling)


class Whole(nn.Module):
    """A model of two modules, called by a third way: `forward` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.head(self.encoder(x))
        return value


@pytest.fixture
def whole(tmp_path: Path) -> Whole:
    """Loaded, and trained for two steps."""
    model = Whole()
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = session.compile(model, BATCH, optimizer, "whole", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, BATCH, optimizer, pef=pef)
    session.run(BATCH)
    session.run(BATCH)
    return model
