"""Running a PEF: ranks, device memory, executor, sharding, gradient sync, metrics. Imports neither torch nor MPI."""
