"""A kill sweep: many runs, each struck down at a random moment in a random way, and what is left of each is looked at.

python -m tests.faults.sweep --runs 150 --seed 1        make faults
"""
