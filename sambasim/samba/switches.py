"""Functions of `samba.env`, `samba.directives` and `samba.utils` that have no effect here, or a fixed answer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once

__all__ = [
    "create_mac_resource_report",
    "disable_sgd_stoc",
    "enable_addbias_grad_accum_stoc",
    "enable_conv_grad_accum_stoc",
    "fix_rdu_affinity",
    "op_fusion",
    "sdpa_directives",
    "use_mock_samba_runtime",
]

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


def _without_effect(name: str, why: str) -> Callable[..., None]:
    def function(*arguments: object, **options: object) -> None:
        say_once(name, why, app_line())

    function.__name__ = function.__qualname__ = name.rpartition(".")[2]
    function.__doc__ = f"No effect: {why}."
    return function


_ROUNDING = "only optimizer steps round stochastically, with --dtype bf16 --enable-stoc-rounding at the compile"
enable_conv_grad_accum_stoc = _without_effect("env.enable_conv_grad_accum_stoc", _ROUNDING)
enable_addbias_grad_accum_stoc = _without_effect("env.enable_addbias_grad_accum_stoc", _ROUNDING)
disable_sgd_stoc = _without_effect("env.disable_sgd_stoc", _ROUNDING)
fix_rdu_affinity = _without_effect("utils.fix_rdu_affinity", "mpirun and --threads place ranks on cores")
create_mac_resource_report = _without_effect(
    "utils.create_mac_resource_report", "sambasim report --tables shows the units of each section"
)


class _Directive:
    """A decorator and a context manager without an effect."""

    def __call__(self, function: Function) -> Function:
        return function

    def __enter__(self) -> "_Directive":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _directive(name: str, why: str) -> Callable[..., Any]:
    def directive(*arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():  # a forward that is being traced cannot print
            say_once(name, why, app_line())
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if is_decorator else _Directive()

    directive.__name__ = directive.__qualname__ = name
    directive.__doc__ = f"As a context manager or a decorator, with any arguments. No effect: {why}."
    return directive


op_fusion = _directive("op_fusion", "sambasim puts operators into sections by its own rules (--o0, --o1, --o3)")
sdpa_directives = _directive("sdpa_directives", "torch's operators compute attention, as the model calls them")
