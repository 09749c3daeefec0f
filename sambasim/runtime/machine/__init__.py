"""The machine below a run: processes, MPI, shared memory, CPU cores, C kernels."""
