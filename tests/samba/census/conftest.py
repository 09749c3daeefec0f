"""Each test is an app of its own: it imports `sambaflow`, nothing is parsed or loaded yet, and nothing was told yet."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from sambasim.runtime.machine.torch_process_group import take_down
from sambasim.samba import context, notices
from sambasim.samba.session import session
from tests.samba.census.support import MOMENTUM, LogReg, OnlyOut, batch_of, imported, seeded
from tests.support.door import open_door

Traced: TypeAlias = tuple[Any, Any]


@pytest.fixture(autouse=True)
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> Iterator[None]:
    """A process whose command line nobody has read yet, in an empty folder."""
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    monkeypatch.setattr(notices, "_SAID", set())
    monkeypatch.chdir(tmp_path)
    session.reset()
    with open_door():
        yield
    session.reset()
    take_down()


@pytest.fixture
def samba() -> Any:
    """`from sambaflow import samba`."""
    return imported("samba")


@pytest.fixture
def batch(samba: Any) -> list[Any]:
    """Two inputs, named image and label."""
    return batch_of(samba)


@pytest.fixture(scope="session")
def pef_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The PEF of a model, compiled the first time that a test asks for it."""
    folder = tmp_path_factory.mktemp("out")
    paths: dict[str, str] = {}

    def compiled(model: type[Any] = LogReg, momentum: float = MOMENTUM, **options: Any) -> str:
        key = f"{model.__name__.lower()}-{momentum}-{'-'.join(map(str, options.values()))}"
        if key not in paths:
            samba = imported("samba")
            made = samba.from_torch_model_(seeded(model, **options))
            batch = batch_of(samba)[: 1 if model is OnlyOut else 2]
            optimizer = samba.optim.SGD(made.parameters(), lr=0.1, momentum=momentum)
            config = {"output_folder": str(folder), "pef_name": key}
            paths[key] = samba.session.compile(made, batch, optimizer, name="net", config_dict=config)
        return paths[key]

    return compiled


@pytest.fixture
def trace(samba: Any, pef_of: Callable[..., str]) -> Callable[..., Traced]:
    """Traces a model; returns it and its optimizer."""

    def traced(model: type[Any] = LogReg, momentum: float = MOMENTUM, **options: Any) -> Traced:
        pef = pef_of(model, momentum, **options)
        made = samba.from_torch_model_(seeded(model, **options))
        optimizer = samba.optim.SGD(made.parameters(), lr=0.1, momentum=momentum)
        samba.utils.trace_graph(made, batch_of(samba)[: 1 if model is OnlyOut else 2], optimizer, pef=pef)
        return made, optimizer

    return traced
