"""`sambaflow.logging`: see `samba_logger`."""

from sambasim.samba.door.outside.logging import samba_logger

__all__ = ["samba_logger"]
