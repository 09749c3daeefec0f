"""Each test is a process of its own: no command line is read, nothing is loaded, reported or said. PEFs are compiled
once for all."""

from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sambasim.runtime.machine.process import take_down
from sambasim.samba import process
from sambasim.samba.process import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import MOMENTUM, Load, LogReg, Made, Net, PefOf, compiled, net_batch, with_sgd
from tests.support.door import open_door


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    process.reset()
    yield
    session.reset()
    process.reset()
    if dist.is_initialized():
        take_down()


@pytest.fixture
def reporter() -> Reporter:
    """What the checks report in this test."""
    return process.current().reporter


@pytest.fixture(scope="session")
def pef_of(tmp_path_factory: pytest.TempPathFactory) -> PefOf:
    paths: dict[object, str] = {}

    def compiled_once(make: Callable[..., Made], inputs: Any, **config: Any) -> str:
        key = make, *config.items()
        if key not in paths:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                paths[key] = compiled(make(), inputs, tmp_path_factory.mktemp("out"), **config)
        return paths[key]

    return compiled_once


@pytest.fixture
def load(pef_of: PefOf) -> Load:
    def loaded(make: Callable[..., Made], inputs: Any, **config: Any) -> Made:
        pef, (model, optimizers) = pef_of(make, inputs, **config), make()
        trace_graph(model, inputs, optimizers, pef=pef)
        return model, optimizers

    return loaded


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> Iterator[None]:
    """The test is an app that imports `sambaflow`, in an empty folder; on one thread, because bits are compared."""
    monkeypatch.chdir(tmp_path)
    with open_door():
        yield


make_logreg, make_net = (partial(with_sgd, kind, momentum=MOMENTUM) for kind in (LogReg, Net))


@pytest.fixture
def inputs() -> tuple[Any, Any]:
    """A batch of Net."""
    return net_batch()


@pytest.fixture
def net(app: None, load: Load) -> Made:
    """Net and its optimizer; the PEF is in the session."""
    return load(make_net, net_batch())


@pytest.fixture
def net_pef(app: None, pef_of: PefOf) -> str:
    return pef_of(make_net, net_batch())
