"""Every test here imports `sambaflow`, as an app does."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.samba import context
from tests.support.door import open_door

BATCH = 4


def imported(module: str) -> Any:
    """A module of `sambaflow`, by its name below it."""
    return import_module(f"sambaflow.{module}")


class Net(nn.Module):
    """Features `[batch, 5]` and classes `[batch]` to the loss of each sample and the outputs."""

    output_tensors: Any

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.second(torch.relu(self.first(x)))
        return nn.functional.cross_entropy(outputs, target, reduction="none"), outputs


def seeded_net() -> Net:
    """The same weights each time."""
    torch.manual_seed(0)
    return Net()


@pytest.fixture(autouse=True)
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is open in each test, in a process whose command line nobody has read yet."""
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    with open_door():
        yield


@pytest.fixture
def samba() -> Any:
    """`from sambaflow import samba`."""
    return imported("samba")


@pytest.fixture
def inputs(samba: Any) -> tuple[Any, Any]:
    """A batch of the net."""
    generator = torch.Generator().manual_seed(1)
    x = samba.from_torch_tensor(torch.randn(BATCH, 5, generator=generator), name="x", batch_dim=0)
    target = samba.from_torch_tensor(torch.randint(3, (BATCH,), generator=generator), name="target", batch_dim=0)
    return x, target


@pytest.fixture(scope="session")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The net compiled with momentum."""
    folder = tmp_path_factory.mktemp("out")
    with open_door():
        samba = imported("samba")
        model = samba.from_torch_model_(seeded_net())
        batch = samba.randn(BATCH, 5, name="x", batch_dim=0), samba.randint(3, (BATCH,), name="target", batch_dim=0)
        optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        path: str = samba.session.compile(
            model, batch, optimizer, name="net", config_dict={"output_folder": str(folder), "pef_name": "net"}
        )
    assert Path(path) == folder / "net" / "net.pef"
    return path


@pytest.fixture
def traced(samba: Any, inputs: tuple[Any, Any], pef: str) -> tuple[Net, Any]:
    """The model and its optimizer; the PEF is in the session."""
    model = samba.from_torch_model_(seeded_net())
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samba.utils.trace_graph(model, inputs, optimizer, pef=pef)
    return model, optimizer
