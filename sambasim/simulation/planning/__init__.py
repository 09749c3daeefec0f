"""Which parallelism a training run should use: every legal strategy is priced, and the best are compared."""
