"""What all tests share: `--update-golden`, an account and examples of their own, hypothesis without deadlines."""

import gc
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support import warm
from tests.support.mpi import job_environ
from tests.support.whole import is_whole

if TYPE_CHECKING:
    from tests.support.examples import CompiledExample

_TESTS = itertools.count(1)

_LONG = (
    *("tests/state/", "tests/mpi/test_bits", "tests/api/", "tests/cli/test_plan", "tests/simulation/test_planning"),
    *("tests/commands/", "tests/samba/shim/", "tests/test_pages", "tests/zoo/", "tests/mpi/", "tests/parity/"),
)
"""Where files of tests take long, the longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing with them"
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(50_000, 20, 50)  # torch and the compiler are a million objects, which a search goes through
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets it for its workers
    # For the workers of pytest-xdist: three processes share the cores, and threads that spin would take them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Tests record what they compile in an account of their own. Workers of pytest-xdist and subprocesses inherit it.
    if not hasattr(config, "workerinput"):
        state = tempfile.TemporaryDirectory(prefix="sambasim-state-")
        config.add_cleanup(state.cleanup)
        os.environ["XDG_STATE_HOME"] = state.name
        if config.option.numprocesses and not is_whole():
            config.add_cleanup(warm.start(job_environ(warm.NO_JOB)))

    # No deadline: how long an example takes depends on the load of the machine.
    hypothesis.settings.register_profile("sambasim", deadline=None, max_examples=100 if is_whole() else 25)
    hypothesis.settings.load_profile("sambasim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order, so that none has a long one left when the others have ended."""
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: next((places[name] for name in _LONG if item.nodeid.startswith(name)), len(_LONG)))


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> "list[CompiledExample]":
    """Every example with every optimizer, with and without clipping; compiled once for all workers."""
    from tests.support.examples import shared_examples  # it imports the compiler, which most tests do not need

    base = tmp_path_factory.getbasetemp()
    return shared_examples((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "examples")


@pytest.fixture(scope="session")
def mesh_pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """char_gpt in two stages, each on two chips, for any number of replicas."""
    from tests.support.examples import ON_CHIPS, SEVERAL, in_stages

    return in_stages("char_gpt", tmp_path_factory.mktemp("mesh"), *ON_CHIPS, *SEVERAL)


@pytest.fixture(scope="module")
def fresh() -> Iterator[None]:
    """Every process of a job starts anew: with a hash seed of its own, the warnings of first imports, and Python's own
    end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(warm.KEY, raising=False)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads are numerics. The count before is restored."""
    import torch  # not the process that only hands tests to workers

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Collections, searches for referrers, and copies of this process skip what was there before the test. None leaves
    objects frozen, as a command does that it runs in this process."""
    if next(_TESTS) % 100 == 0:
        gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
