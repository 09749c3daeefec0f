"""Communication schedules as data: executed by the runtime, priced by the simulation.

tree      the order in which the operands of replicas are added
schedule  who sends which slice to whom in a reduce-scatter and an all-gather, and what that takes
"""
