"""Seeding everything that draws numbers."""

from sambasim.errors import UserError
from sambasim.runtime.randomness import seed_everything


def set_seed(seed: int) -> None:
    """Set the generators of torch, numpy and random, on this rank. The same seed on all ranks makes the same weights.

    Raises UserError for a negative seed.
    """
    if seed < 0:
        raise UserError(f"a seed is a whole number of at least 0, and this one is {seed}", remedy="utils.set_seed(1)")
    seed_everything(seed)
