"""`python -m sambasim` is `sambasim`; `python -m sambasim [--check] SCRIPT.py ...` is `sambasim app` with the same."""

import sys

from sambasim.cli.main import main

if sys.argv[1:] and (sys.argv[1].endswith(".py") or sys.argv[1].startswith("--check")):
    sys.argv.insert(1, "app")
main()
