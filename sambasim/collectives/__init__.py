"""HOW REPLICAS TALK: schedules as data. No tensors, no MPI."""
