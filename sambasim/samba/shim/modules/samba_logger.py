"""`sambaflow.logging.samba_logger`: a logger whose lines say which rank wrote them.

mpirun merges what all ranks print, so every line names its rank where a launcher started several. The module is used
as a logger itself (`samba_logger.info(...)`), and it has one of that name (`samba_logger.samba_logger.info(...)`).
Lines go to standard error from level INFO on; it is Python's logger `sambaflow`, and takes levels and handlers as such.
"""

import logging
import os

from sambasim.runtime.launcher import find_launcher

__all__ = ["critical", "debug", "error", "exception", "info", "log", "samba_logger", "setLevel", "warning"]


def _make_logger() -> logging.Logger:
    launcher = find_launcher(os.environ)
    rank = "" if launcher is None else f" rank {launcher.rank}"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s{rank} %(levelname)s: %(message)s"))
    logger = logging.getLogger("sambaflow")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # an app that configures the root logger too would read every line twice
    return logger


samba_logger = _make_logger()

debug = samba_logger.debug
info = samba_logger.info
warning = samba_logger.warning
error = samba_logger.error
critical = samba_logger.critical
exception = samba_logger.exception
log = samba_logger.log
setLevel = samba_logger.setLevel
