"""The parts of a run: plan, data shards, replicas, training."""
