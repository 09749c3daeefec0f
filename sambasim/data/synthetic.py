"""Random samples of given inputs: to compile, to measure and to try a model without data."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sambasim.options.grammar import FLOAT_DTYPES, InputSpec

DEFAULT_SAMPLES = 1024
DEFAULT_BOUND = 2
"""Whole numbers without a bound are 0 or 1: an index that every model knows."""

_MASK = 2**64 - 1


def _mix(seed: int, index: int) -> int:
    """One 64-bit seed from two, such that neighbours have nothing alike (splitmix64; Steele et al., OOPSLA 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class SyntheticDataset(Dataset[dict[str, Tensor]]):
    """Sample i is a pure function of (seed, i), the same on every rank and in every run.

    Floats are normal with mean 0 and deviation 1; whole numbers uniform below their bound; truth values even.
    """

    def __init__(self, inputs: Sequence[InputSpec], samples: int = DEFAULT_SAMPLES, seed: int = 0) -> None:
        self.inputs = tuple(inputs)
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        generator = torch.Generator().manual_seed(_mix(self.seed, index))
        return {spec.name: _draw(spec, generator) for spec in self.inputs}


def _draw(spec: InputSpec, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.dtype in FLOAT_DTYPES:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    bound = DEFAULT_BOUND if spec.exclusive_bound is None else spec.exclusive_bound
    return torch.randint(bound, spec.shape, generator=generator).to(dtype)
