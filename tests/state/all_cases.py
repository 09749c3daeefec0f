"""All cases: a module of cases adds them as it is imported."""

from tests.state import (
    counters,
    far,
    first_calls,
    fitting,
    losses,
    messages,
    optimizers,
    process,
    remedies,
    tensors,
    wrongly,
)
from tests.state.case import CASES

MODULES = (counters, far, first_calls, fitting, losses, messages, optimizers, process, remedies, tensors, wrongly)

__all__ = ["CASES", "MODULES"]
