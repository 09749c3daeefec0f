"""What a run records on request: traces, digests, numerics."""
