"""What an app tells the hardware's compiler about a part of its model. No number depends on it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once

__all__ = ["op_fusion", "sdpa_directives"]

Function = TypeVar("Function", bound=Callable[..., Any])


def op_fusion(*arguments: Any, **options: Any) -> Any:
    """That some operators belong into one kernel: `with op_fusion(…):` around them, `@op_fusion(…)` or `@op_fusion` on
    their function. It takes any arguments, and what it is put on is traced and computed as without it; one notice says
    so."""
    if not torch.compiler.is_compiling():  # in a forward that is being traced, nothing can be printed
        why = "operators are put into sections by sambasim's own rules (--o0, --o1, --o3)"
        say_once("op_fusion", why, app_line())
    return _directive(arguments, options)


def sdpa_directives(*arguments: Any, **options: Any) -> Any:
    """How the RDU computes scaled dot-product attention; it is used as `op_fusion` is, and changes nothing either."""
    if not torch.compiler.is_compiling():
        why = "attention is computed by torch's operators, as the model calls them"
        say_once("sdpa_directives", why, app_line())
    return _directive(arguments, options)


def _directive(arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return arguments[0]
    return _Directive()


class _Directive:
    """It leaves a function as it is, and does nothing around a block."""

    def __call__(self, function: Function) -> Function:
        return function

    def __enter__(self) -> "_Directive":
        return self

    def __exit__(self, *error: object) -> None:
        return None
