"""What a training step is predicted to take on devices; nothing here is measured or run.

alone, memory, sync, scaling   one rank: its sections, its memory, what it sends, and its step with the sync of replicas
step                           the cost of its actions in a pipeline, and the step of all ranks
prediction, advice             the steps of a program by number of replicas, and what would make them quicker
machine, planning              rates of this machine, and the search for a strategy
"""
