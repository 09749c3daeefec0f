"""Where two runs, PEFs or files of weights begin to differ, and by how much."""
