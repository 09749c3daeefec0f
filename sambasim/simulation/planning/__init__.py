"""How to train a model on many ranks: a search over strategies.

strategy                    what a strategy is, and all that are legal
layers, one_rank, estimate  estimates of any strategy, from the program of a replica of one rank
priced, search              the price of a compiled program, and the best strategies
here                        strategies on this machine, from measured rates
"""
