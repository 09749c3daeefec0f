"""Names without an effect, with a notice; and errors for names that sambasim does not have."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn, TypeVar

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import UserError
from sambasim.runtime.machine.launcher import launched_rank
from sambasim.samba.findings import app_error, app_line
from sambasim.samba.process import current

__all__ = [
    "create_mac_resource_report", "disable_sgd_stoc", "enable_addbias_grad_accum_stoc", "enable_conv_grad_accum_stoc",
    "fix_rdu_affinity", "op_fusion", "sdpa_directives", "use_mock_samba_runtime",
]  # fmt: skip
"""What `samba.env` and `samba.directives` export."""


def say_once(name: str, why: str) -> None:
    """Prints once in this process, on rank 0, that `name` has no effect, and the line of the app."""
    said = current().said
    if name not in said and launched_rank(os.environ) == 0:
        where = app_line()
        place = f"  where: {where}\n" if where else ""
        sys.stderr.write(f"notice: {name} has no effect: {why}\n{place}")
    said.add(name)


class AbsentNameError(UserError, AttributeError):
    """A use of a name that SambaFlow has and sambasim does not."""

    code: ClassVar[str] = "absent"


class AbsentName:
    """A name that SambaFlow has and sambasim does not. Imports and annotations succeed; a call, an attribute, a
    subclass and `isinstance` raise AbsentNameError."""

    def __init__(self, name: str, what: str, instead: str) -> None:
        """name: the full name; what: what it is in SambaFlow; instead: what the app can do here."""
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


def no_such_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for `module.name`, with the nearest names in `known`, or all if they are few."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=4, cutoff=0.6) or (choices if len(choices) <= 12 else [])
    hint = f"; similar names: {', '.join(near)}" if near else ""
    return AttributeError(f"{module} has no {name}{hint}")


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


def without_effect(name: str, why: str) -> Callable[..., None]:
    """A function that takes any arguments and prints one notice."""

    def function(*arguments: object, **options: object) -> None:
        say_once(name, why)

    function.__name__ = function.__qualname__ = name.rpartition(".")[2]
    function.__doc__ = f"No effect: {why}."
    return function


_ROUNDING = "only optimizer steps round stochastically, with --dtype bf16 --enable-stoc-rounding at the compile"
enable_conv_grad_accum_stoc = without_effect("env.enable_conv_grad_accum_stoc", _ROUNDING)
enable_addbias_grad_accum_stoc = without_effect("env.enable_addbias_grad_accum_stoc", _ROUNDING)
disable_sgd_stoc = without_effect("env.disable_sgd_stoc", _ROUNDING)
fix_rdu_affinity = without_effect("utils.fix_rdu_affinity", "mpirun and --threads place ranks on cores")
create_mac_resource_report = without_effect(
    "utils.create_mac_resource_report", "sambasim report --tables shows the units of each section"
)


class _Directive(nullcontext[None]):
    """A context manager and a decorator without an effect."""

    def __call__(self, function: Function) -> Function:
        return function


def _directive(name: str, why: str) -> Callable[..., Any]:
    def directive(*arguments: Any, **options: Any) -> Any:
        if not is_tracing():  # a forward that is being traced cannot print
            say_once(name, why)
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if is_decorator else _Directive()

    directive.__name__ = directive.__qualname__ = name
    directive.__doc__ = f"As a context manager or a decorator, with any arguments. No effect: {why}."
    return directive


op_fusion = _directive("op_fusion", "sambasim puts operators into sections by its own rules (--o0, --o1, --o3)")
sdpa_directives = _directive("sdpa_directives", "torch's operators compute attention, as the model calls them")
