"""What an app asks about where it runs, and switches of the RDU's rounding."""

from contextlib import AbstractContextManager, nullcontext

from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once

__all__ = [
    "disable_sgd_stoc",
    "enable_addbias_grad_accum_stoc",
    "enable_conv_grad_accum_stoc",
    "use_mock_samba_runtime",
]


def use_mock_samba_runtime() -> bool:
    """Whether the runtime is one that computes nothing: False. There is no RDU here, but every number is computed, so
    an app that leaves out its checks of results under a mock runtime makes them here."""
    return False


def enable_conv_grad_accum_stoc(*arguments: object, **options: object) -> None:
    """No effect: gradients of convolutions are added up without stochastic rounding."""
    _no_such_rounding("enable_conv_grad_accum_stoc")


def enable_addbias_grad_accum_stoc(*arguments: object, **options: object) -> None:
    """No effect: gradients of biases are added up without stochastic rounding."""
    _no_such_rounding("enable_addbias_grad_accum_stoc")


def disable_sgd_stoc(*arguments: object, **options: object) -> None:
    """No effect: SGD rounds stochastically only with --enable-stoc-rounding."""
    _no_such_rounding("disable_sgd_stoc")


def is_internal() -> bool:
    """Whether this is SambaFlow's own development build: False."""
    return False


def patched_torch() -> AbstractContextManager[None]:
    """Around a forward on the host; torch is the same in it as outside."""
    return nullcontext()


def _no_such_rounding(name: str) -> None:
    why = "stochastic rounding is that of optimizer steps alone, by --dtype bf16 --enable-stoc-rounding at the compile"
    say_once(f"env.{name}", why, app_line())
