"""Many runs, each hit by a random fault at a random moment; then what is left of each is checked.

python -m tests.faults.sweep --runs 150 --seed 1        make faults
"""
