"""`sambaflow` in the process of the tests."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sambasim.samba import shim


@contextmanager
def open_door() -> Iterator[None]:
    """Within it, `import sambaflow` finds sambasim's; then nothing of it is left."""
    before = list(sys.meta_path)
    shim.install()
    yield
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name == shim.ROOT or name.startswith(f"{shim.ROOT}.")]:
        del sys.modules[name]
