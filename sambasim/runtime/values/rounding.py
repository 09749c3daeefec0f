"""Stochastic rounding adds 16 random bits to the 16 low bits of a float32 that bfloat16 lacks, then cuts these off.
Sources: Gupta et al., ICML 2015, arXiv:1502.02551; Zamirai et al., 2020, arXiv:2010.06192. The bits are those of
numpy's Philox4x64-10 (Salmon et al., SC11, doi:10.1145/2063384.2063405), which depend on no rank and no slice:

    key       (seed, step)
    counter   (position in the parameter / 16 + 1, number of the parameter's first block, number of the tensor, 0)

The number of the tensor is 0 for the parameter, then that of its state.
"""

import sys

import numpy as np
import torch
from torch import Tensor


def draw(seed: int, step: int, parameter: int, tensor: int, start: int, stop: int) -> Tensor:
    """Random int32 from 0 to 65,535, one for each element from `start`, a multiple of 16, to `stop`. `step` counts from
    1; see the module's docstring for the others."""
    # A counter gives four 64-bit numbers; numpy increments it before it draws, hence the + 1 of the docstring.
    words = np.array([start // 16, parameter, tensor, 0], dtype=np.uint64)
    generator = np.random.Philox(key=np.array([seed, step], dtype=np.uint64), counter=words)
    drawn = generator.random_raw(-(-(stop - start) // 4)).view(np.uint16)[: stop - start]
    if sys.byteorder == "big":
        drawn = drawn.byteswap()
    return torch.from_numpy(drawn.astype(np.int32))


def round_stochastically(values: Tensor, draws: Tensor, out: Tensor) -> None:
    """Round `values` (float32, overwritten) to `out` (bfloat16). What bfloat16 can represent keeps its value."""
    lost = values.isnan()  # a carry out of the low bits would turn NaN into a number
    values.view(torch.int32).add_(draws).bitwise_and_(-(1 << 16))
    out.copy_(values.masked_fill_(lost, torch.nan))
