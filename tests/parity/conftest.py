"""One thread unless a test says otherwise, and the examples, compiled once for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.examples import CompiledExample, compile_examples


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads are numerics: bits are compared at one count. The count before is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompiledExample, ...]:
    """Every example with every optimizer, with and without clipping."""
    return tuple(compile_examples(tmp_path_factory.mktemp("parity")))


@pytest.fixture(scope="session")
def example_path(examples: tuple[CompiledExample, ...]) -> dict[tuple[str, str, bool], Path]:
    """The PEFs by example, optimizer, and whether gradients are clipped."""
    return {(one.example, one.optimizer, one.clipped): one.path for one in examples}
