"""`python -m sambasim` is `sambasim`."""

from sambasim.cli.main import main

main()
