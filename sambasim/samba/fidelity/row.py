"""One row of the fidelity page."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How faithful a thing is."""

    SAME = "same"
    """It does what it does there, as far as the public facts say what that is."""
    SIMPLIFIED = "simplified"
    """It does the most of it, a simpler thing, or more than is known of it; the row says what."""
    NO_EFFECT = "no effect"
    """It is taken, so that apps go on, and nothing depends on it; the row says why."""
    ABSENT = "absent"
    """It is not there; what is called raises an error that says so."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing of SambaFlow.

    name: of an API row, its path below `sambaflow`; of a flag, its first spelling
    note: what there is to know, in a line
    takes: the keywords that apps give it
    name_alone: whether the public facts have no more than the name; then it is the smallest thing that an app would
        expect of it
    test: of a behaviour, the test that holds it, as pytest names it; None where there is nothing to run
    """

    name: str
    status: Status
    note: str = ""
    takes: tuple[str, ...] = ()
    name_alone: bool = False
    test: str | None = None
