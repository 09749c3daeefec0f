"""Passes over a program, one deed a file, and the pipeline that runs them.

A pass is a frozen dataclass whose fields are its options. It may assume a program that `ir.verify` accepts at the stage
it says that it `needs`, and must leave one at the stage that it `reaches`.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from sambasim.ir.program import Program
from sambasim.ir.verify import Stage, verify


class Pass(Protocol):
    """One deed on a program."""

    title: ClassVar[str]
    reaches: ClassVar[Stage]

    def __call__(self, program: Program) -> Program:
        """The program after the deed."""


def run_pipeline(program: Program, pipeline: Sequence[Pass], before: Callable[[str], None]) -> Program:
    """`program` after every pass of `pipeline`; `before` hears each title. Raises InvariantError after a bad pass."""
    for step in pipeline:
        before(step.title)
        program = step(program)
        verify(program, step.reaches)
    return program
