"""The parts of a run. Files import only from those above:

plan, run_observer  which steps there are, and who is told of them
replica             a replica with its shard of the data
setup               options, and the team of replicas
training            the loop
stepwise            the same, driven step by step by a SambaFlow app
"""
