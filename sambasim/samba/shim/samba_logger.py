"""`sambaflow.logging.samba_logger`: a logger whose lines name the rank, because mpirun merges the output of all ranks.

The module is a logger itself (`samba_logger.info(...)`), and has one (`samba_logger.samba_logger.info(...)`): Python's
logger `sambaflow`, which prints on standard error from level INFO on.
"""

import logging
import os

from sambasim.runtime.machine.launcher import find_launcher

__all__ = ["critical", "debug", "error", "exception", "info", "log", "samba_logger", "setLevel", "warning"]

samba_logger = logging.getLogger("sambaflow")
samba_logger.setLevel(logging.INFO)
samba_logger.propagate = False  # with a handler of the root logger too, every line would be printed twice

_launcher = find_launcher(os.environ)
_rank = "" if _launcher is None else f" rank {_launcher.rank}"
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter(f"%(asctime)s{_rank} %(levelname)s: %(message)s"))
samba_logger.addHandler(_handler)

debug = samba_logger.debug
info = samba_logger.info
warning = samba_logger.warning
error = samba_logger.error
critical = samba_logger.critical
exception = samba_logger.exception
log = samba_logger.log
setLevel = samba_logger.setLevel
