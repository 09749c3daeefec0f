"""One thread unless a test says otherwise, and the examples, compiled once for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from tests.support.examples import compile_examples

Variant: TypeAlias = tuple[str, str, bool]
"""Example, optimizer, and whether gradients are clipped."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads are numerics: bits are compared at one count. The count before is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, Path]:
    """Every example with every optimizer, with and without clipping."""
    compiled = compile_examples(tmp_path_factory.mktemp("parity"))
    return {(one.example, one.optimizer, one.clipped): one.path for one in compiled}
