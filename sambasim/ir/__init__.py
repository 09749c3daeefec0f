"""THE GRAPH: pure data. No torch, no files, no MPI."""
