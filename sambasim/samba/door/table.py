"""What `sambaflow` and the modules below it are here: one row a module.

A module that an app can import has a row; so has every package above it. Names inside a module need none: they are
whatever our module has.
"""

from collections.abc import Mapping

ROOT = "sambaflow"

MODULES: Mapping[str, str] = {
    "sambaflow": "sambasim.samba.door.outside",
    "sambaflow.logging": "sambasim.samba.door.outside.logging",
    "sambaflow.logging.samba_logger": "sambasim.samba.door.outside.logging.samba_logger",
    "sambaflow.mac": "sambasim.samba.door.outside.mac",
    "sambaflow.mac.metadata": "sambasim.samba.door.outside.mac.metadata",
    "sambaflow.samba": "sambasim.samba",
    "sambaflow.samba.directives": "sambasim.samba.directives",
    "sambaflow.samba.env": "sambasim.samba.env",
    "sambaflow.samba.lazy_param": "sambasim.samba.lazy_param",
    "sambaflow.samba.materialize": "sambasim.samba.materialize",
    "sambaflow.samba.nn": "sambasim.samba.nn",
    "sambaflow.samba.nn.parameter": "sambasim.samba.nn.parameter",
    "sambaflow.samba.optim": "sambasim.samba.optim",
    "sambaflow.samba.profiler": "sambasim.samba.profiler",
    "sambaflow.samba.sambaloader": "sambasim.samba.sambaloader",
    "sambaflow.samba.sambatensor": "sambasim.samba.sambatensor",
    "sambaflow.samba.schema": "sambasim.samba.schema",
    "sambaflow.samba.schema.snconfig": "sambasim.samba.schema.snconfig",
    "sambaflow.samba.test": "sambasim.samba.test",
    "sambaflow.samba.utils": "sambasim.samba.utils",
    "sambaflow.samba.utils.argparser": "sambasim.samba.utils.argparser",
    "sambaflow.samba.utils.benchmark_acc": "sambasim.samba.utils.benchmark_acc",
    "sambaflow.samba.utils.checkpoint": "sambasim.samba.utils.checkpoint",
    "sambaflow.samba.utils.common": "sambasim.samba.utils.common",
    "sambaflow.samba.utils.dataset": "sambasim.samba.utils.dataset",
    "sambaflow.samba.utils.dataset.mnist": "sambasim.samba.utils.dataset.mnist",
    "sambaflow.samba.utils.pef_utils": "sambasim.samba.utils.pef_utils",
    "sambaflow.samba.utils.tensorboard_debug": "sambasim.samba.utils.tensorboard_debug",
    "sambaflow.sambacollections": "sambasim.samba.door.outside.sambacollections",
}
"""By the name that an app imports: the module of ours that answers."""


def children(package: str) -> tuple[str, ...]:
    """The last parts of the names of the modules directly below `package`."""
    return tuple(child for name in MODULES for parent, _, child in [name.rpartition(".")] if parent == package)
