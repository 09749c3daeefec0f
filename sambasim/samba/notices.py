"""Notices for names that have no effect here, and errors for names that are not here."""

import difflib
import os
import sys
from collections.abc import Iterable
from typing import ClassVar, NoReturn

from sambasim.errors import UserError
from sambasim.runtime.launcher import launched_rank
from sambasim.samba.checks.place import app_line

_SAID: set[str] = set()


def say_once(name: str, why: str, where: str | None = None) -> None:
    """Prints once in this process, on rank 0, that `name` has no effect, and the app's line `where`."""
    if name not in _SAID:
        _SAID.add(name)
        if launched_rank(os.environ) == 0:
            place = f"  where: {where}\n" if where else ""
            sys.stderr.write(f"notice: {name} has no effect: {why}\n{place}")


class AbsentNameError(UserError, AttributeError):
    """The app used a name that is not here."""

    code: ClassVar[str] = "absent"


class AbsentName:
    """Stands for an imported name that is not here: the import succeeds, and the use raises AbsentNameError.

    It may appear in annotations and in `try: import`; a call, an attribute, a subclass and `isinstance` raise.
    """

    def __init__(self, name: str, what: str, instead: str) -> None:
        """name: the full name; what: what it is in SambaFlow; instead: what the app can do here."""
        self._name, self._what, self._instead = name, what, instead

    def _refuse(self, *arguments: object, **keywords: object) -> NoReturn:
        raise AbsentNameError(f"sambasim has no {self._name}: {self._what}", where=app_line(), remedy=self._instead)

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = __iter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # Python and libraries probe for these
            raise AttributeError(name)
        return self._refuse()

    def __or__(self, other: object) -> object:
        return self  # `Queue | None` in an annotation

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._name}, which sambasim does not have>"


def no_such_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for `module.name`, with the nearest names in `known`, or all if they are few."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=4, cutoff=0.6) or (choices if len(choices) <= 12 else [])
    hint = f"; near it there is {', '.join(near)}" if near else ""
    return AttributeError(f"{module} has no {name}{hint}")
