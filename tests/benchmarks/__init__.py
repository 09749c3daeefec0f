"""The speed of this version against another one, measured in one run: `make bench OTHER=CHECKOUT`.

Nothing here is asserted: a slow machine is no bug. Run it on a machine that does nothing else.
"""
