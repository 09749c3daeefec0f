"""`sambaflow.logging.samba_logger`: a logger whose lines name the rank, because mpirun merges the output of all ranks.

The module is a logger itself (`samba_logger.info(...)`), and has one (`samba_logger.samba_logger.info(...)`): Python's
logger `sambaflow`, which prints on standard error from level INFO on. Only an app that imports it gets its handler.
"""

import logging

from sambasim.runtime.machine.launcher import find_launcher

samba_logger = logging.getLogger("sambaflow")
samba_logger.setLevel(logging.INFO)
samba_logger.propagate = False  # with a handler of the root logger too, every line would be printed twice

_launcher = find_launcher()
_rank = "" if _launcher is None else f" rank {_launcher.rank}"
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter(f"%(asctime)s{_rank} %(levelname)s: %(message)s"))
samba_logger.addHandler(_handler)

debug, info, warning, error = samba_logger.debug, samba_logger.info, samba_logger.warning, samba_logger.error
critical, exception, log = samba_logger.critical, samba_logger.exception, samba_logger.log
setLevel = samba_logger.setLevel
