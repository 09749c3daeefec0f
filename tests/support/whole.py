"""Tests that are not part of every run, because they take minutes: `make test-whole` runs them."""

import os
from typing import Any

import pytest


def is_whole() -> bool:
    """Whether they are part of this run."""
    return os.environ.get("SAMBASIM_TEST") == "whole"


whole = pytest.mark.skipif(not is_whole(), reason="only with SAMBASIM_TEST=whole, as in make test-whole")
"""Marks such a test, or a class of them."""


def whole_case(*values: Any) -> Any:
    """A case of a parametrized test that is one of them."""
    return pytest.param(*values, marks=whole)
