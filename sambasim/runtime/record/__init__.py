"""Digests of what a run computes, for `sambasim compare`; nothing of it is there unless it is asked for."""
