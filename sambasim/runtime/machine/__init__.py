"""The machine below a run: launchers, MPI, the memory of a node, this process with its PyTorch and cores, C kernels."""
