"""MODEL -> PEF: capture, passes, data-parallel sections, partition, placement."""
