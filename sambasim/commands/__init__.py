"""What a command does, for the shell and for Python alike: no click here, and nothing is printed.

question               what is asked, about which PEF or config; predictions for it
compile, child, proof  makes a PEF in a child process, then compares it with its model
plan, variants         checks and prices strategies, and writes the best as a config
memory, results, run   estimate-memory; report and compare; run
outputs                files that commands write
torch_optimizers       optimizers of a script
"""
