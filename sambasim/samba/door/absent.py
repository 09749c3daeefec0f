"""The errors for names of `sambaflow` that are not here."""

import difflib
from collections.abc import Sequence
from typing import ClassVar

from sambasim.errors import UserError
from sambasim.samba.absent import AbsentNameError as AbsentNameError

_NEAR = 3
_LISTED = 12


class AbsentModuleError(UserError, ModuleNotFoundError):
    """A module of `sambaflow` that is not here was imported, or a name that a module does not have."""

    code: ClassVar[str] = "absent"


def what_is_absent(owner: str, name: str) -> str:
    """`("sambaflow.samba", "rndn")` as the first line of an error."""
    return f"sambasim has no {owner}.{name}"


def what_there_is(owner: str, name: str, known: Sequence[str], exported: Sequence[str]) -> str:
    """What to use instead of `name`: what is near it of all that is `known` in `owner`, else what that exports."""
    spelled = {word.lower(): word for word in known}
    near = difflib.get_close_matches(name.lower(), spelled, n=_NEAR)
    if near:
        return " or ".join(f"{owner}.{spelled[word]}" for word in near)
    if not exported:
        return f"the app without it: {owner} is empty here"
    more = f", and {len(exported) - _LISTED} more" if len(exported) > _LISTED else ""
    return f"what {owner} has: {', '.join(sorted(exported)[:_LISTED])}{more}"
