"""`sambaflow` itself: its version, and below it the few modules outside `sambaflow.samba` that apps import."""

from sambasim import __version__ as _own_version

__version__ = f"1.19.0+sambasim.{_own_version}"
"""The SambaFlow whose shape this has, and who answers in its place; apps print it, or compare it with a release."""

__all__ = ["__version__"]
