"""AP04: a keyword that a function of the library does not have."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from sambasim.samba.checks.findings import KeywordError
from sambasim.samba.checks.place import app_line

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def checks_keywords(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """`function`, which raises KeywordError for a keyword that it does not have, with the nearest that it has."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    fast = frozenset(known)

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        for name in kwargs:
            if name not in fast:
                raise KeywordError(
                    f"AP04: {_name_in_apps(function)} takes no {name}",
                    where=app_line(),
                    remedy=nearest(name, known, form="{}="),
                )
        return function(*args, **kwargs)

    return checked


def nearest(name: str, known: Collection[str], form: str = "{}") -> str:
    """What to type instead of `name`: the nearest of those that are `known`, else all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {form.format(near[0])}?" if near else f"it takes {', '.join(known)}"


def _name_in_apps(function: Callable[..., object]) -> str:
    """`session.run` for `Session.run`: apps have an instance."""
    owner, dot, name = function.__qualname__.rpartition(".")
    return f"{owner.lower()}{dot}{name}"
