"""Running a PEF. Imports neither torch nor MPI. Packages import only from their own line and those above:

machine     processes, MPI, shared memory, CPU cores, C kernels
values      device memory and weights, means of gradients, optimizers
watch       observers of a step; status files and the supervisor, which ends a job that stalls
transports  how gradients and messages go from rank to rank
engine      a program as Python functions, and their execution
run         the parts of a run: plan, data shards, replicas, training
checkpoint  writing, choosing and reading checkpoints
record      traces, digests and numerics of a run
measure     what `sambasim bench` and `plan --here` measure
job         a whole run
inference   evaluation and predictions
outcome     the summary of a run
"""
