"""The `sambaflow` import shim: `import sambaflow` in a script imports sambasim.

    command                               how the shim gets on `sys.path`
    sambasim app SCRIPT.py run ...        the folder `path_entry` is inserted behind the script's own folder
    python -m sambasim SCRIPT.py ...      the same
    eval "$(sambasim env)"                the folder is at the front of PYTHONPATH, for plain `python SCRIPT.py run ...`

The folder holds a package `sambaflow` that only calls `enter`. A script that does not import it is not affected. An
installed SambaFlow takes precedence, with a notice on stderr.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

from sambasim.runtime.machine.launcher import launched_rank
from sambasim.samba import ending
from sambasim.samba.shim import finder


def enter(folder: Path) -> None:
    """Puts the `sambaflow` that the app gets into `sys.modules`: an installed one, or ours.

    folder: the folder on `sys.path` with the package that calls this, which is replaced
    """
    others = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != folder.resolve()]
    installed = PathFinder.find_spec(finder.ROOT, others)
    del sys.modules[finder.ROOT]
    if installed is None or installed.origin is None:  # without origin it is a folder without code, such as data
        finder.install()
        ending.install()
    else:
        if launched_rank(os.environ) == 0:
            notice = f"notice: SambaFlow is installed ({installed.origin}), and is used in place of sambasim"
            print(notice, file=sys.stderr)
        sys.path[:] = others
    import_module(finder.ROOT)
