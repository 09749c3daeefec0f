"""All cases: a module of cases adds them as it is imported."""

from tests.state import counters, far, first_calls, fitting, process, remedies, tensors, wrongly  # noqa: F401 -- each adds its cases
from tests.state.case import CASES

__all__ = ["CASES"]
