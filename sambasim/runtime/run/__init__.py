"""The parts of a run, each from those above: plan and run_observer (steps, and what is told of them), replica (with its
shard of the data), setup (options, and the team of replicas), training; and stepwise, which an app drives."""
