"""Where errors leave the Python API: they speak Python, and not of flags."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from sambasim.errors import SambasimError
from sambasim.options.python_words import in_python

P = ParamSpec("P")
R = TypeVar("R")


def speaks_python(*, compiles: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a function of the API. `compiles`: its keywords are the flags of `sambasim compile`."""

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except SambasimError as error:
                translate(error, compiles=compiles)
                raise

        return called

    return decorator


def translate(error: SambasimError, *, compiles: bool = False) -> None:
    """The parts of `error` in words of Python; not the user's line."""
    error.what = in_python(error.what, compiles=compiles, typed=sys.argv)
    error.remedy = error.remedy and in_python(error.remedy, compiles=compiles, typed=sys.argv)
    error.args = (error.what,)
