"""`python -m sambasim` is `sambasim`; and `python -m sambasim SCRIPT.py ...` is `sambasim app SCRIPT.py ...`, with
`--check` before SCRIPT.py too."""

import sys

from sambasim.cli.main import main

if sys.argv[1:] and (sys.argv[1].endswith(".py") or sys.argv[1].startswith("--check")):
    sys.argv.insert(1, "app")
main()
