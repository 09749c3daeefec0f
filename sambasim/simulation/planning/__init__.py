"""How to train a model on many ranks: a search over strategies.

strategy            a strategy, all that are possible, and the predicted step of a compiled one
one_rank, estimate  estimates of any strategy, from the program of a replica of one rank and its layers
search              the best strategies
here                strategies on this machine, from measured rates
"""
