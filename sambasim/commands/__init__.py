"""What a command does, for the shell and for Python alike: no click here, and nothing is printed.

question               the PEF or model that a command is about, and predictions for it
compile, child, proof  makes a PEF in a child process, then compares it with its model
plan, variants         checks and prices strategies, and writes the best as a config; estimate-memory
run                    run
results                report, compare
torch_optimizers       optimizers of a script, and their schedulers
"""
