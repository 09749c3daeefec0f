"""One thread unless a test says otherwise, and the examples, compiled once for all tests of this folder."""

from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.examples import CompiledExample

Variant: TypeAlias = tuple[str, str, bool]
"""Example, optimizer, and whether gradients are clipped."""


@pytest.fixture(autouse=True)
def same_threads(one_thread: None) -> None:
    """Bits are compared at one count."""


@pytest.fixture(scope="session")
def pefs(examples: list[CompiledExample]) -> dict[Variant, Path]:
    """Every example with every optimizer, with and without clipping."""
    return {(one.example, one.optimizer, one.clipped): one.path for one in examples}
