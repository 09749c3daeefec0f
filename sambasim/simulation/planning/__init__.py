"""How to train a model on many ranks: a search over strategies.

strategy            what a strategy is, all that are legal, and the price of a compiled program
one_rank, estimate  estimates of any strategy, from the program of a replica of one rank
search              the best strategies
here                strategies on this machine, from measured rates
"""
