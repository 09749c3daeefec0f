"""PEFs that are compiled once for all tests of the checks, and apps that have loaded them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.samba.checks import arguments, data, job, replicas, unfetched, unsent
from sambasim.samba.checks.findings import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.ones(2, 3)]


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Reporter:
    """Collects what the checks report, in place of the reporter of this process."""
    own = Reporter(on_demand=True)
    for module in (arguments, data, job, replicas, unfetched, unsent):
        monkeypatch.setattr(module, "reporter", own)
    return own


@dataclass
class App:
    """A model with its optimizer, whose PEF is loaded, and its findings."""

    model: nn.Sequential
    optimizer: samba.optim.AdamW
    reporter: Reporter

    def step(self, *section_types: str, **hyperparameters: float) -> None:
        kinds = section_types or None
        session.run(BATCH, hyperparam_dict=hyperparameters or None, section_types=kinds)

    @property
    def changes(self) -> list[str]:
        """The findings about changes that do not reach the device."""
        return [finding.words for finding in self.reporter.findings if finding.code == "AP05"]


def made() -> tuple[nn.Sequential, samba.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    samba.from_torch_model_(model)
    model[0].bias.requires_grad_(False)
    return model, samba.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)


def made_linear() -> tuple[nn.Module, samba.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1))
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


def loaded_linear(pef: str) -> tuple[nn.Module, samba.optim.SGD]:
    """The model of `linear_pef`, loaded."""
    model, optimizer = made_linear()
    trace_graph(model, BATCH, optimizer, pef=pef)
    return model, optimizer


class Whole(nn.Module):
    """A model of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.head(self.encoder(x))
        return value


def made_whole() -> tuple[Whole, samba.optim.SGD]:
    model = Whole()
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


def _compiled(made: tuple[nn.Module, samba.optim.SGD | samba.optim.AdamW], paths: pytest.TempPathFactory) -> str:
    model, optimizer = made
    return session.compile(model, BATCH, optimizer, "net", config_dict={"output_folder": str(paths.mktemp("out"))})


@pytest.fixture(scope="session")
def app_pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _compiled(made(), tmp_path_factory)


@pytest.fixture(scope="session")
def linear_pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _compiled(made_linear(), tmp_path_factory)


@pytest.fixture(scope="session")
def whole_pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _compiled(made_whole(), tmp_path_factory)


@pytest.fixture
def app(app_pef: str, reporter: Reporter) -> App:
    model, optimizer = made()
    trace_graph(model, BATCH, optimizer, pef=app_pef)
    return App(model, optimizer, reporter)


@pytest.fixture
def whole(whole_pef: str) -> Whole:
    """Loaded, and trained for two steps."""
    model, optimizer = made_whole()
    trace_graph(model, BATCH, optimizer, pef=whole_pef)
    session.run(BATCH)
    session.run(BATCH)
    return model
