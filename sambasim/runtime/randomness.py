"""Randomness as a function of (seed, rank, step, micro-step, stream).

Each replica sets its generators from this before it reads a batch, and again before it runs a graph that draws numbers.
So what a replica draws does not depend on which process plays it, nor on what was drawn before.
"""

import hashlib
import random
from enum import StrEnum

import numpy as np
import torch


class Stream(StrEnum):
    """What the numbers are for; streams do not disturb one another."""

    SOURCE = "source"  # opening the data, the same on every rank
    DATA = "data"
    GRAPH = "graph"
    WORKER = "worker"


def derive(seed: int, rank: int, step: int, micro_step: int, stream: Stream) -> int:
    """A number of 63 bits that depends on every argument."""
    text = f"{seed} {rank} {step} {micro_step} {stream}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int) -> None:
    """Set torch's own generator: the only one that a graph draws from."""
    torch.default_generator.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Set the generators of torch, numpy and random: what the code of a dataset may draw from."""
    seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
