"""`sambaflow` itself: its version, and below it the few modules outside `sambaflow.samba` that apps import."""

from sambasim import __version__ as _own_version

__version__ = f"1.19.0+sambasim.{_own_version}"
"""The SambaFlow whose shape this has, and who answers in its place; apps print it, or compare it with a release."""

__all__ = ["__version__", "is_demo"]


class _No:
    """False, read as a value or called."""

    def __bool__(self) -> bool:
        return False

    def __call__(self) -> bool:
        return False


is_demo = _No()
"""Whether this SambaFlow is a demonstration: apps read it as a value or call it, and it is false both ways."""
