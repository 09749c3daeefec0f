"""Stochastic rounding of float32 to bfloat16, by draws that are a function of what is rounded, and when.

A number between two neighbours of bfloat16 becomes either of them, the nearer one more often: the mean over many draws
is the number itself, where rounding to nearest would lose every update that is smaller than half a step of bfloat16.

    how      16 random bits are added to the 16 bits of a float32 that a bfloat16 lacks, and these are cut off.
             Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015, arXiv:1502.02551;
             Zamirai et al., Revisiting BFloat16 Training, 2020, arXiv:2010.06192
    draws    Philox4x64-10, which makes numbers of a key and a counter, and keeps no state. Salmon et al., Parallel
             Random Numbers: As Easy as 1, 2, 3, SC11, doi:10.1145/2063384.2063405. It is numpy's, whose stream numpy
             promises to keep

        key       (seed, step)
        counter   (position in the group / 16 + 1, number of the group, number of the tensor in it, 0)

So neither the rank that rounds nor the slice or piece that it rounds in changes what is drawn.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_DRAWS_OF_A_COUNTER = 16
"""Four numbers of 64 bits, 16 bits a draw."""

_LOST_BITS = 16
_KEPT = -(1 << _LOST_BITS)  # as a mask of an int32


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws for one flat tensor: the parameters, say, of group number `group` of a run with `seed`."""

    seed: int
    group: int
    tensor: int

    def of(self, step: int, start: int, stop: int) -> Tensor:
        """For the elements `start` to `stop`, multiples of 16, in optimizer step `step`: int32, from 0 to 65,535."""
        # Numpy counts before it draws: that is the 1.
        words = np.array([start // _DRAWS_OF_A_COUNTER, self.group, self.tensor, 0], dtype=np.uint64)
        generator = np.random.Philox(key=np.array([self.seed, step], dtype=np.uint64), counter=words)
        drawn = generator.random_raw((stop - start) // 4).view(np.uint16)
        if sys.byteorder == "big":
            drawn = drawn.byteswap()
        return torch.from_numpy(drawn.astype(np.int32))


def round_stochastically(values: Tensor, draws: Tensor, out: Tensor) -> None:
    """`out`, of bfloat16, becomes `values`, of float32, which are overwritten; all are flat and of one length.

    What bfloat16 can hold stays what it is, and so do infinities and what is not a number. A finite number beyond
    the largest of bfloat16 may become infinite, as when it is rounded to nearest.
    """
    lost = values.isnan()  # a carry out of its last bits would make a number of it
    bits = values.view(torch.int32)
    bits.add_(draws).bitwise_and_(_KEPT)
    out.copy_(values.masked_fill_(lost, torch.nan))
