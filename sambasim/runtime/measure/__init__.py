"""What the sync paths take on this machine: every path in one run, its result checked."""
