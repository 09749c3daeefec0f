"""What `from sambasim import samba` gives, and what it leaves unimported."""

import importlib
import subprocess
import sys

from sambasim import samba
from sambasim.samba import sambaloader, sambatensor


def test_importing_it_loads_no_mpi() -> None:
    code = "import sys; import sambasim.samba; print('mpi4py' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_vendors_module_names_give_the_same_things() -> None:
    assert sambaloader.SambaLoader is samba.SambaLoader
    assert sambatensor.SambaTensor is samba.SambaTensor


def test_session_is_the_one_of_this_process_and_utils_the_package() -> None:
    assert samba.session is importlib.import_module("sambasim.samba.session").session
    assert samba.utils is importlib.import_module("sambasim.samba.utils")
