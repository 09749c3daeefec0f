"""PEF -> NUMBERS: ranks, device memory, executor, sharding, gradient sync, metrics.

Importing this package imports neither torch nor MPI: the modules do, when they are used.
"""
