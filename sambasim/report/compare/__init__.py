"""`sambasim compare`: the first difference of two runs, PEFs, weight files or checkpoints."""
