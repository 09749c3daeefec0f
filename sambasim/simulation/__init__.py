"""What a training step is predicted to take on devices. Nothing here runs a model.

alone       one rank without sync
memory      the memory of a rank
sync        what ranks send each other
scaling     the step of one rank in each of several replicas
step        the step of all ranks, also of a pipeline
prediction  the steps of a program by number of replicas
advice      what would make them quicker
machine     rates of this machine, as `runtime/measure` measured them
planning    the search for a strategy
"""
