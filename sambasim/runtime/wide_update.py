"""OPT on parameters and states that are stored in 16 bits: float32 in between.

    widen     a piece of parameters, gradient and states becomes float32, without a change
    compute   by the fused kernel for float32
    round     parameters and states back to their type: once, to nearest, or stochastically (see `rounding`)

Torch's own kernels for 16 bits are not used: in torch 2.13, the fused SGD of a CPU leaves such parameters as they are.
Its Adam and AdamW compute and round as is done here, and give the same bits.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.collectives.slices import pieces
from sambasim.runtime.rounding import Draws, round_stochastically

PIECE_ELEMENTS = 32_768
"""Elements that are updated at a time: their float32 stays in a core's cache."""

_Update: TypeAlias = Callable[[Tensor], None]


class WideUpdates:
    """Makes the updates of slices; all of them compute in one piece of scratch.

    seed: of stochastic rounding; None rounds to nearest
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
        """What updates `parameter` and `states` in place, given their gradient; all are flat, of one type and length.

        group, start: the number of the group, and where in it the slice starts, a multiple of 64
        step: the number of the optimizer step that is under way
        update: makes what updates a parameter and states of float32
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
        """`count` places for `numel` numbers of float32, the same ones for every slice."""
        while len(self._scratch) < count:
            self._scratch.append(torch.empty(PIECE_ELEMENTS, dtype=torch.float32))
        return [whole[:numel] for whole in self._scratch[:count]]

    def _narrowing(
        self, group: int, tensor: int, start: int, stop: int, step: Callable[[], int]
    ) -> Callable[[Tensor, Tensor], object]:
        """What keeps a value of float32 at its place; `tensor` is its number in the group, the parameters' is 0."""
        if self._seed is None:
            return _to_nearest
        return partial(_stochastically, Draws(self._seed, group, tensor), start, stop, step)


def _to_nearest(value: Tensor, place: Tensor) -> None:
    place.copy_(value)


def _stochastically(draws: Draws, start: int, stop: int, step: Callable[[], int], value: Tensor, place: Tensor) -> None:
    round_stochastically(value, draws.of(step(), start, stop), place)
