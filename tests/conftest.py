"""What all tests share: the flag that writes golden files anew, an account of their own, laws without a deadline."""

import gc
import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing with them"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Tests note what they compile in an account of their own, which their subprocesses share.
    state = tempfile.TemporaryDirectory(prefix="sambasim-state-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name

    # No assertion of time: an example of a law takes as long as a busy machine lets it.
    hypothesis.settings.register_profile("sambasim", deadline=None)
    hypothesis.settings.load_profile("sambasim")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads are numerics. The count before is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """No test leaves objects frozen, as a command does that it runs in this process."""
    yield
    gc.unfreeze()
