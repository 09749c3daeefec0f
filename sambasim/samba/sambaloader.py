"""SambaLoader, where SambaFlow's apps import it from."""

from sambasim.samba.loader import SambaLoader

__all__ = ["SambaLoader"]
