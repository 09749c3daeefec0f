"""The machine below a run: launchers, MPI, the memory of a node, CPU cores, and PyTorch in this process."""
