"""`python -m sambasim` is `sambasim`; and `python -m sambasim SCRIPT.py ...` is `sambasim app SCRIPT.py ...`."""

import sys

from sambasim.cli.main import main

if sys.argv[1:] and sys.argv[1].endswith(".py"):
    sys.argv.insert(1, "app")
main()
