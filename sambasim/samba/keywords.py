"""AP04: calls of library functions with keywords that they do not have."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import UserError
from sambasim.samba.findings import app_error, app_line
from sambasim.samba.notices import say_once


class KeywordError(UserError, TypeError):
    """A call of a library function with arguments that it does not have."""

    code = "keyword"


OTHER_WORDS = {"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas"}
"""Names in other libraries, and the keyword of torch's optimizers for each."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def checks_keywords(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """A decorator that ignores unknown keywords, with a notice.

    The decorated function raises KeywordError for a misspelled keyword and for wrong positional arguments.
    """
    owner, dot, name = function.__qualname__.rpartition(".")
    # `session.run` for `Session.run`: apps use an instance.
    return checks_keywords_of(f"{owner.lower()}{dot}{name}", ())(function)


def checks_keywords_of(
    called: str, passed_on: Collection[str], *, refused_later: Collection[str] = ()
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """As `checks_keywords`, under the name `called`, with further keywords that are `passed_on` to torch.

    refused_later: known keywords that no remedy proposes, because a PEF cannot contain what they ask for
    """

    def decorate(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        parameters = inspect.signature(function).parameters.values()
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        known = [name for name in dict.fromkeys((*named, *passed_on)) if name not in ("self", "cls")]
        offered = [name for name in known if name not in refused_later]
        fast = frozenset(known)

        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            if not fast.issuperset(kwargs):
                _drop_unknown(called, kwargs, known, offered)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # from inside the function
                raise KeywordError(
                    f"AP04: {called} got wrong arguments: {error}",
                    where=app_line(),
                    remedy=f"its arguments are {', '.join(offered)}" if offered else "it takes no arguments",
                ) from None

        return checked

    return decorate


def _drop_unknown(called: str, keywords: dict[str, object], known: Collection[str], offered: Collection[str]) -> None:
    for name in [name for name in keywords if name not in known]:
        del keywords[name]
        if is_tracing():  # a traced forward can neither compare words nor print
            continue
        if _nearly(name, known):
            near = _nearly(name, offered)
            remedy = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(offered)}"
            raise app_error(KeywordError, f"AP04: {called} takes no {name}", remedy)
        say_once(f"{called}({name}=…)", "sambasim does not know this keyword")


def nearest(name: str, known: Collection[str], form: str = "{}") -> str:
    """A remedy for a wrong `name`: the nearest of the `known` names, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {form.format(near[0])}?" if near else f"it takes {', '.join(known)}"


def _nearly(name: str, known: Collection[str]) -> list[str]:
    """Those of `known` that `name` misspells, or extends, as `optimizer` extends `optim`."""
    if OTHER_WORDS.get(name) in known:
        return [OTHER_WORDS[name]]
    longer = [short for short in known if len(short) > 1 and name.startswith(short) and name[len(short) :].isalpha()]
    return longer or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
