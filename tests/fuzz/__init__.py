"""Files from a stranger: mutants of sound ones, tried in every way in that a user has.

    python -m tests.fuzz pef --count 20000 --seed 1 --minutes 30

Mutant N of a seed is the same on every machine, so a finding is told by its number, and its file is kept.
"""
