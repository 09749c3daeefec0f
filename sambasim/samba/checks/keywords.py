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
    """`function`, which raises KeywordError for a keyword that it does not have, with the nearest that it has.

    One that takes any keyword, for the vendor's changes nothing here, refuses those that are nearly one of its own.
    """
    return _checked(function, _name_in_apps(function), (), ())


def checks_keywords_beside(
    name: str, passed_on: Collection[str], *, refused_later: Collection[str] = ()
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """The same for what apps call `name`, and what takes, beside keywords of its own, those that are `passed_on` to
    torch, and no others.

    refused_later: those that are known, and of which no remedy tells: what is asked for with them is refused
    """
    return lambda function: _checked(function, name, passed_on, refused_later)


def _checked(
    function: Callable[Arguments, Answer], called: str, passed_on: Collection[str], refused_later: Collection[str]
) -> Callable[Arguments, Answer]:
    parameters = inspect.signature(function).parameters.values()
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [name for name in dict.fromkeys((*named, *passed_on)) if name not in ("self", "cls")]
    offered = [name for name in known if name not in refused_later]
    takes_any = not passed_on and any(one.kind is one.VAR_KEYWORD for one in parameters)
    fast = frozenset(known)

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        for name in kwargs:
            if name not in fast and (not takes_any or _nearly(name, known)):
                raise KeywordError(
                    f"AP04: {called} takes no {name}",
                    where=app_line(),
                    remedy=nearest(name, _nearly(name, offered) or offered, form="{}="),
                )
        return function(*args, **kwargs)

    return checked


def nearest(name: str, known: Collection[str], form: str = "{}") -> str:
    """What to type instead of `name`: the nearest of those that are `known`, else all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {form.format(near[0])}?" if near else f"it takes {', '.join(known)}"


def _nearly(name: str, known: Collection[str]) -> list[str]:
    """Those of `known` that `name` is a slip of, or a longer word for, as `optimizer` is for `optim`."""
    longer = [short for short in known if len(short) > 1 and name.startswith(short) and name[len(short) :].isalpha()]
    return longer or difflib.get_close_matches(name, known, n=1, cutoff=0.8)


def _name_in_apps(function: Callable[..., object]) -> str:
    """`session.run` for `Session.run`: apps have an instance."""
    owner, dot, name = function.__qualname__.rpartition(".")
    return f"{owner.lower()}{dot}{name}"
