"""Imports the body that the first argument names, as `sambasim run` imports what it needs, and calls its `main`.

    python -m tests.mpi.bodies.start BODY ARGUMENT...

Every rank of every job imports torch, and garbage collection would take a quarter of that time.
"""

import sys
from importlib import import_module

from sambasim.cli.shared import kept_imports

with kept_imports():
    body = import_module(f"tests.mpi.bodies.{sys.argv[1]}")
sys.argv[:2] = [str(body.__file__)]
body.main()
