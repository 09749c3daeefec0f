"""How to train a model on many ranks: a search over strategies.

strategy                   what a strategy is, all that are legal, and the price of a compiled program
one_rank, chain, estimate  estimates of any strategy, from the program of a replica of one rank and its layers
search                     the best strategies
here                       strategies on this machine, from measured rates
"""
