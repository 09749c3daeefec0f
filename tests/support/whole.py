"""Tests that only `make test-whole` runs, because they take minutes."""

import os
from typing import Any

import pytest


def is_whole() -> bool:
    return os.environ.get("SAMBASIM_TEST") == "whole"


whole = pytest.mark.skipif(not is_whole(), reason="only with SAMBASIM_TEST=whole, as in make test-whole")
"""Marks a test or a class that only `make test-whole` runs."""


def whole_case(*values: Any) -> Any:
    """A case of a parametrized test that only `make test-whole` runs."""
    return pytest.param(*values, marks=whole)
