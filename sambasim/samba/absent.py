"""Errors for names that SambaFlow has and sambasim does not."""

import difflib
from collections.abc import Iterable
from typing import ClassVar, NoReturn

from sambasim.errors import UserError
from sambasim.samba.checks.place import app_line


class AbsentNameError(UserError, AttributeError):
    """The app asked for a name that is not here."""

    code: ClassVar[str] = "absent"


class AbsentName:
    """What an import of a name that is not here gives: the import succeeds, and using the name raises AbsentNameError.

    It may stand in annotations and behind `try: import`; calling it, reading an attribute, subclassing it and
    `isinstance` raise.
    """

    def __init__(self, name: str, what: str, instead: str) -> None:
        """name: the full name; what: what it is in SambaFlow; instead: what the app can do here."""
        self._name, self._what, self._instead = name, what, instead

    def _refuse(self, *arguments: object, **keywords: object) -> NoReturn:
        raise AbsentNameError(f"sambasim has no {self._name}: {self._what}", where=app_line(), remedy=self._instead)

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = __iter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # what Python and its libraries probe
            raise AttributeError(name)
        return self._refuse()

    def __or__(self, other: object) -> object:
        return self  # `Queue | None` in an annotation

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._name}, which sambasim does not have>"


def no_such_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error to raise for `module.name`: it gives the names in `known` that are near, or, if none is and they are
    few, all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=4, cutoff=0.6) or (choices if len(choices) <= 12 else [])
    hint = f"; near it there is {', '.join(near)}" if near else ""
    return AttributeError(f"{module} has no {name}{hint}")
