"""Repeatable runs: one number of threads, deterministic kernels, and seeds for all random numbers.

Random numbers are a function of (seed, rank, step, micro-step, stream).
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import torch


def make_repeatable(threads: int) -> None:
    """Use `threads` intra-op threads and deterministic kernels in this process from now on. Torch would then also fill
    uninitialised memory, which costs a pass over every tensor."""
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` would import a compiler, in seconds
    torch._C._set_deterministic_fill_uninitialized_memory(False)


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """`make_repeatable` within a block; restores torch's settings afterwards."""
    before = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    make_repeatable(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_deterministic_debug_mode(mode)
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


class Stream(StrEnum):
    """What random numbers are used for. Streams are independent of one another."""

    SOURCE = "source"  # opening the data, the same on every rank
    DATA = "data"
    GRAPH = "graph"
    WORKER = "worker"


def derive(seed: int, rank: int, step: int, micro_step: int, stream: Stream) -> int:
    text = f"{seed} {rank} {step} {micro_step} {stream}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random, which the code of a dataset may use."""
    seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
