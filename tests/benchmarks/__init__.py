"""Figures against named peers, as ratios of medians, each taken in one run: `make bench`.

Nothing here is asserted: a slow machine is no bug. Run it on a machine that does nothing else.
"""
