"""Mutants of valid files, by a seed: each is read as valid, or refused by an error of sambasim.

    python -m tests.fuzz pef checkpoint --count 20000 --seed 1

Mutant N of a seed is the same on every machine.
"""
