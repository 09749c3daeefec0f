"""The `sambaflow` import shim: `import sambaflow` in a script imports sambasim.

    command                               how the shim gets on `sys.path`
    sambasim app SCRIPT.py run ...        the folder `path_entry` is inserted behind the script's own folder
    python -m sambasim SCRIPT.py ...      the same
    eval "$(sambasim env)"                the folder is at the front of PYTHONPATH, for plain `python SCRIPT.py run ...`

The folder holds a package `sambaflow` that only calls `enter`, which replaces it: an import finder in `sys.meta_path`
then answers for `sambaflow` and all its modules. So a script that does not import `sambaflow` is not affected.

A SambaFlow that is really installed takes precedence, with a notice on stderr.

A name that sambasim does not have raises an ImportError or AttributeError, as in Python, so an app may catch it; and it
is a `UserError`, so otherwise it is printed without a traceback, with similar names.

`ending.py` says how a script ends, alone or as one rank of a job.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from sambasim.runtime.launcher import launched_rank
from sambasim.samba.shim import ending, finder


def enter(folder: Path) -> None:
    """Put the real `sambaflow` into `sys.modules`: an installed one, or ours.

    folder: the folder on `sys.path` with the package that calls this, which is to be replaced
    """
    installed = find_installed(folder)
    del sys.modules[finder.ROOT]
    if installed is None:
        finder.install()
        ending.install()
    else:
        if launched_rank(os.environ) == 0:
            notice = f"notice: SambaFlow is installed ({installed.origin}), and is used in place of sambasim"
            print(notice, file=sys.stderr)
        sys.path[:] = [entry for entry in sys.path if not _is(entry, folder)]
    import_module(finder.ROOT)


def find_installed(folder: Path) -> ModuleSpec | None:
    """The spec of a `sambaflow` outside `folder`; None if there is none, or only a folder without code."""
    spec = PathFinder.find_spec(finder.ROOT, [entry for entry in sys.path if not _is(entry, folder)])
    return spec if spec is not None and spec.origin is not None else None


def _is(entry: str, folder: Path) -> bool:
    return Path(entry or os.curdir).resolve() == folder.resolve()
