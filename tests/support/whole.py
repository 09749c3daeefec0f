"""Tests that are not part of every run, because starting so many apps takes minutes: `make test-apps` runs them."""

import os

import pytest


def is_whole() -> bool:
    """Whether they are part of this run."""
    return os.environ.get("SAMBASIM_TEST_APPS") == "whole"


whole = pytest.mark.skipif(not is_whole(), reason="only in make test-apps")
"""Marks such a test, or a class of them."""
