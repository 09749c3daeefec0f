"""What happens when a script imports `sambaflow` for the first time."""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from sambasim.runtime.launcher import launched_rank
from sambasim.samba.door import ending, finder
from sambasim.samba.door.table import ROOT


def enter(folder: Path) -> None:
    """Put the true `sambaflow` into `sys.modules`: ours, or the one that is installed beside us.

    folder: the folder on `sys.path` in which Python found the package that calls this, and is about to be replaced
    """
    real = find_real(folder)
    del sys.modules[ROOT]
    if real is None:
        finder.install()
        ending.install()
    else:
        if launched_rank(os.environ) == 0:
            print(f"notice: a SambaFlow is installed ({real.origin}): it is used, and not sambasim", file=sys.stderr)
        sys.path[:] = [entry for entry in sys.path if not _is(entry, folder)]
    import_module(ROOT)


def find_real(folder: Path) -> ModuleSpec | None:
    """Where a `sambaflow` is that does not lie in `folder`. A bare folder of that name, without code in it, is none."""
    spec = PathFinder.find_spec(ROOT, [entry for entry in sys.path if not _is(entry, folder)])
    return spec if spec is not None and spec.origin is not None else None


def _is(entry: str, folder: Path) -> bool:
    return Path(entry or os.curdir).resolve() == folder.resolve()
