"""Names and keywords without an effect, with a notice; errors for those that sambasim does not have (AP04)."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, ParamSpec, TypeVar

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import UserError
from sambasim.options.problem import suggested
from sambasim.samba.process import app_error, app_line, current, print_notice

__all__ = [
    "create_mac_resource_report", "disable_sgd_stoc", "enable_addbias_grad_accum_stoc", "enable_conv_grad_accum_stoc",
    "fix_rdu_affinity", "op_fusion", "sdpa_directives", "use_mock_samba_runtime",
]  # fmt: skip
"""What `samba.env` and `samba.directives` export."""


def say_once(name: str, why: str) -> None:
    """Prints once in this process, on rank 0, that `name` has no effect, and the line of the app."""
    said = current().said
    if name not in said:
        where = app_line()
        print_notice(f"{name} has no effect: {why}" + (f"\n  where: {where}" if where else ""))
    said.add(name)


class AbsentNameError(UserError, AttributeError, code="absent"):
    """A use of a name that SambaFlow has and sambasim does not."""


class AbsentName:
    """A name that SambaFlow has and sambasim does not. Imports and annotations succeed; a call, an attribute, a
    subclass and `isinstance` raise AbsentNameError."""

    def __init__(self, name: str, what: str, instead: str) -> None:
        """The full name, what it is in SambaFlow, and what the app can do here."""
        self._name, self._what, self._instead = name, what, instead

    def _refuse(self, *arguments: object, **keywords: object) -> NoReturn:
        raise app_error(AbsentNameError, f"sambasim has no {self._name}: {self._what}", self._instead)

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


Function = TypeVar("Function", bound=Callable[..., Any])


def use_mock_samba_runtime() -> bool:
    """Whether the runtime computes nothing: False, so apps check their results here."""
    return False


def is_internal() -> bool:
    """Whether this is SambaFlow's own development build: False."""
    return False


def patched_torch() -> AbstractContextManager[None]:
    """Around a forward on the host; torch stays as it is."""
    return nullcontext()


class _Directive(nullcontext[None]):
    """A context manager and a decorator without an effect."""

    def __call__(self, function: Function) -> Function:
        return function


def without_effect(name: str, why: str, *, directive: bool = False) -> Callable[..., Any]:
    """A function that takes any arguments and prints one notice; a directive is a context manager or a decorator."""

    def function(*arguments: Any, **options: Any) -> Any:
        if not is_tracing():  # a forward that is being traced cannot print
            say_once(name, why)
        if directive:
            is_decorator = len(arguments) == 1 and callable(arguments[0]) and not options
            return arguments[0] if is_decorator else _Directive()

    function.__name__ = function.__qualname__ = name.rpartition(".")[2]
    function.__doc__ = f"No effect: {why}."
    return function


_ROUNDING = "only optimizer steps round stochastically, with --dtype bf16 --enable-stoc-rounding at the compile"
enable_conv_grad_accum_stoc = without_effect("env.enable_conv_grad_accum_stoc", _ROUNDING)
enable_addbias_grad_accum_stoc = without_effect("env.enable_addbias_grad_accum_stoc", _ROUNDING)
disable_sgd_stoc = without_effect("env.disable_sgd_stoc", _ROUNDING)
fix_rdu_affinity = without_effect("utils.fix_rdu_affinity", "mpirun and --threads place ranks on cores")
_UNITS = "sambasim report --tables shows the units of each section"
create_mac_resource_report = without_effect("utils.create_mac_resource_report", _UNITS)
_FUSION = "sambasim puts operators into sections by its own rules (--o0, --o1, --o3)"
op_fusion = without_effect("op_fusion", _FUSION, directive=True)
_ATTENTION = "torch's operators compute attention, as the model calls them"
sdpa_directives = without_effect("sdpa_directives", _ATTENTION, directive=True)


class KeywordError(UserError, TypeError, code="keyword"):
    """A call of a library function with arguments that it does not have."""


OTHER_WORDS = {"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas"}
"""Names in other libraries, and the keyword of torch's optimizers for each."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def checks_keywords(
    called: str = "", passed_on: Collection[str] = (), *, refused_later: Collection[str] = ()
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """A decorator that ignores unknown keywords, with a notice, and raises KeywordError for misspelled ones and for
    wrong positional arguments. called: the name in messages, by default `session.run` for `Session.run`; passed_on:
    further keywords, which go to torch; refused_later: those that no remedy proposes, because a PEF cannot have them"""

    def decorate(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        owner, dot, short = function.__qualname__.rpartition(".")
        name = called or f"{owner.lower()}{dot}{short}"
        parameters = inspect.signature(function).parameters.values()
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        known = [word for word in dict.fromkeys((*named, *passed_on)) if word not in ("self", "cls")]
        offered = [word for word in known if word not in refused_later]
        fast = frozenset(known)

        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            if not fast.issuperset(kwargs):
                _drop_unknown(name, kwargs, known, offered)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # from inside the function
                remedy = f"its arguments are {', '.join(offered)}" if offered else "it takes no arguments"
                raise app_error(KeywordError, f"AP04: {name} got wrong arguments: {error}", remedy) from None

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


def nearest(name: str, known: Collection[str]) -> str:
    """A remedy for a wrong `name`: the nearest of the `known` names, or all of them."""
    return suggested(name, known) or f"it takes {', '.join(known)}"


def _nearly(name: str, known: Collection[str]) -> list[str]:
    """Those of `known` that `name` misspells, or extends, as `optimizer` extends `optim`."""
    if OTHER_WORDS.get(name) in known:
        return [OTHER_WORDS[name]]
    longer = [short for short in known if len(short) > 1 and name.startswith(short) and name[len(short) :].isalpha()]
    return longer or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
