"""Gradient sync: the REDUCE and GATHER sections, through the host, directly between devices, or in one process."""
