"""Tests that only `make test-whole` runs, because they take minutes."""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def is_whole() -> bool:
    return os.environ.get("SAMBASIM_TEST") == "whole"


whole = pytest.mark.skipif(not is_whole(), reason="only with SAMBASIM_TEST=whole, as in make test-whole")
"""Marks a test or a class that only `make test-whole` runs."""


def every_second(cases: Iterable[Any]) -> list[Any]:
    """Cases of a parametrized test, of which `make test` runs every second."""
    return [whole_case(one) if at % 2 else one for at, one in enumerate(cases)]


def whole_case(*values: Any) -> Any:
    """A case of a parametrized test that only `make test-whole` runs."""
    return pytest.param(*values, marks=whole)
