"""The update (OPT) of parameters and states that are stored in 16 bits: computed in float32, then rounded.

    widen     a piece of parameters, gradient and states becomes float32, exactly
    compute   by the fused kernel for float32
    round     parameters and states back to their dtype, once: to nearest, or stochastically

Torch's own kernels for 16 bits are not used: in torch 2.13, the fused SGD for CPUs does not change such parameters. Its
Adam and AdamW compute and round as this module does, with the same bits.

Stochastic rounding adds 16 random bits to the 16 low bits of a float32 that bfloat16 lacks, then cuts these off. The
mean over many draws is the number itself, where rounding to nearest would lose every update below half a step of
bfloat16. Sources: Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015, arXiv:1502.02551; Zamirai et
al., Revisiting BFloat16 Training, 2020, arXiv:2010.06192.

The random bits come from Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC11,
doi:10.1145/2063384.2063405), a counter-based generator without state. It is numpy's, whose stream numpy keeps stable.

    key       (seed, step)
    counter   (position in the group / 16 + 1, number of the group, number of the tensor in it, 0)

So neither the rank that rounds nor the slice that it rounds changes the bits.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sambasim.collectives.slices import pieces

_DRAWS_OF_A_COUNTER = 16
"""Each counter gives four 64-bit numbers; a draw has 16 bits."""

_LOST_BITS = 16
_KEPT = -(1 << _LOST_BITS)  # as a mask of an int32


@dataclass(frozen=True, slots=True)
class Draws:
    """The random bits for one flat tensor: number `tensor` of group number `group`, in a run with `seed`."""

    seed: int
    group: int
    tensor: int

    def of(self, step: int, start: int, stop: int) -> Tensor:
        """For the elements `start` to `stop`, multiples of 16, in optimizer step `step`: int32, from 0 to 65,535."""
        # Numpy increments the counter before it draws, hence the + 1 in the module's docstring.
        words = np.array([start // _DRAWS_OF_A_COUNTER, self.group, self.tensor, 0], dtype=np.uint64)
        generator = np.random.Philox(key=np.array([self.seed, step], dtype=np.uint64), counter=words)
        drawn = generator.random_raw((stop - start) // 4).view(np.uint16)
        if sys.byteorder == "big":
            drawn = drawn.byteswap()
        return torch.from_numpy(drawn.astype(np.int32))


def round_stochastically(values: Tensor, draws: Tensor, out: Tensor) -> None:
    """Round `values` (float32, overwritten) to `out` (bfloat16); all are flat and of one length.

    Numbers that bfloat16 can represent, infinities and NaN keep their value. A finite number beyond the largest
    bfloat16 may become infinite, as when it is rounded to nearest.
    """
    lost = values.isnan()  # a carry out of the low bits would turn NaN into a number
    bits = values.view(torch.int32)
    bits.add_(draws).bitwise_and_(_KEPT)
    out.copy_(values.masked_fill_(lost, torch.nan))


PIECE_ELEMENTS = 32_768
"""Elements that are updated at a time, so that their float32 copies stay in a core's cache."""

_Update: TypeAlias = Callable[[Tensor], None]


class WideUpdates:
    """Makes the updates of slices, which share their scratch buffers.

    seed: for stochastic rounding; None rounds to nearest
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._scratch: list[Tensor] = []

    def slice(
        self,
        group: int,
        start: int,
        parameter: Tensor,
        states: Mapping[str, Tensor],
        step: Callable[[], int],
        update: Callable[[Tensor, Mapping[str, Tensor]], _Update],
    ) -> _Update:
        """A function that takes the gradient and updates `parameter` and `states` in place; all are flat, of one dtype
        and length.

        group, start: the number of the group, and the offset of the slice in it, a multiple of 64
        step: returns the number of the current optimizer step
        update: makes the function that updates a parameter and states of float32
        """
        stored = [parameter, *states.values()]
        done = []
        for a, b in pieces(0, parameter.numel(), PIECE_ELEMENTS):
            gradient, *wide = self._wide(1 + len(stored), b - a)
            compute = update(wide[0], dict(zip(states, wide[1:], strict=True)))
            narrow = [
                (whole[a:b], value, self._narrowing(group, number, start + a, start + b, step))
                for number, (whole, value) in enumerate(zip(stored, wide, strict=True))
            ]
            done.append((slice(a, b), gradient, compute, narrow))

        def update_slice(narrow_gradient: Tensor) -> None:
            for where, gradient, compute, narrow in done:
                gradient.copy_(narrow_gradient[where])
                for place, value, _ in narrow:
                    value.copy_(place)
                compute(gradient)
                for place, value, keep in narrow:
                    keep(value, place)

        return update_slice

    def _wide(self, count: int, numel: int) -> list[Tensor]:
        """`count` float32 buffers of `numel` elements, which all slices share."""
        while len(self._scratch) < count:
            self._scratch.append(torch.empty(PIECE_ELEMENTS, dtype=torch.float32))
        return [whole[:numel] for whole in self._scratch[:count]]

    def _narrowing(
        self, group: int, tensor: int, start: int, stop: int, step: Callable[[], int]
    ) -> Callable[[Tensor, Tensor], object]:
        """A function that stores a float32 value, rounded. `tensor` is its number in the group; parameters have 0."""
        if self._seed is None:
            return _to_nearest
        return partial(_stochastically, Draws(self._seed, group, tensor), start, stop, step)


def _to_nearest(value: Tensor, place: Tensor) -> None:
    place.copy_(value)


def _stochastically(draws: Draws, start: int, stop: int, step: Callable[[], int], value: Tensor, place: Tensor) -> None:
    round_stochastically(value, draws.of(step(), start, stop), place)
