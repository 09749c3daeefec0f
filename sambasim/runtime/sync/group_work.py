"""What one rank does for one group: add up its slice, and update it, in pieces that fit a core's cache."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sambasim.collectives.slices import Slice, pieces
from sambasim.records.trace import Track
from sambasim.runtime.gradient_norm import block_sums
from sambasim.runtime.kernels.tree_mean import Sum
from sambasim.runtime.optimizers import SliceUpdate
from sambasim.runtime.sync.mean import CHUNK_ELEMENTS, TreeMean
from sambasim.runtime.trace.watched import Args, Watched

_CACHED_ELEMENTS = 4 << 20
"""Slices that are longer come from memory, not from a cache that cores share."""


def _piece_elements(slice_elements: int) -> int:
    """How long the pieces of a slice are. Those of a slice that comes from memory leave room in a core's own cache for
    what is fetched ahead."""
    return CHUNK_ELEMENTS if slice_elements <= _CACHED_ELEMENTS else CHUNK_ELEMENTS // 2


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the slice: what adds it up in `scratch`, its part of this rank's gradient, and what updates it."""

    add_up: Sum
    scratch: Tensor
    gradient: Tensor
    update: SliceUpdate


class GroupWork:
    """REDUCE and OPT on this rank's slice of one group.

    gradients: by rank, the group's whole flat gradient in device memory that this process can read
    received: by rank, operands of this slice alone, which come from other nodes
    own: this rank; where means are kept, they go over its own gradient
    update_of: what updates a piece of the group, by where it starts and stops
    update_divides: whether it divides; then it is given sums, where a mean is not kept
    near: whether the gradients lie in a core's own cache
    """

    def __init__(
        self,
        owned: Slice,
        own: int,
        gradients: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        mean: TreeMean,
        update_of: Callable[[int, int], SliceUpdate],
        update_divides: bool,
        near: bool,
    ) -> None:
        add_up = mean.total_of if update_divides else mean.of
        start, stop = owned
        # In the order of the ranks that they came from.
        operands = [
            gradients[rank][start:stop] if rank in gradients else received[rank]
            for rank in sorted({*gradients, *received})
        ]
        self._owned_gradient = gradients[own][start:stop]
        self._reduce = mean.of(operands, self._owned_gradient, near)
        self._pieces = []
        for a, b in pieces(start, stop, _piece_elements(stop - start)):
            part, scratch = slice(a - start, b - start), mean.scratch[: b - a]
            self._pieces.append(
                _Piece(
                    add_up=add_up([operand[part] for operand in operands], scratch, near),
                    scratch=scratch,
                    gradient=self._owned_gradient[part],
                    update=update_of(a, b),
                )
            )

    def watched(self, name: str) -> Sequence[Watched]:
        """What a trace shows of the group called `name`, where it is reduced and updated in two passes."""

        def of_group(*call: object) -> Args:
            return {"group": name}

        return [
            Watched(self, "block_sums", Track.SECTIONS, "GRADNORM", of_group),
            Watched(self, "update", Track.SECTIONS, "OPT", of_group),
        ]

    def reduce(self) -> None:
        """The slice of this rank's gradient becomes the mean."""
        self._reduce()

    def block_sums(self) -> Sequence[float]:
        """Of the reduced slice: the sums of squares by blocks."""
        return block_sums(self._owned_gradient, (0, self._owned_gradient.numel()))

    def update(self, coefficient: float) -> None:
        """OPT with the reduced slice, multiplied by `coefficient` unless that is 1."""
        for piece in self._pieces:
            if coefficient != 1.0:
                piece.gradient.mul_(coefficient)
            piece.update(piece.gradient)

    def reduce_and_update(self) -> float:
        """Both in one pass over memory; the mean is not kept. Returns the seconds in the optimizer."""
        clock, updating_s = time.perf_counter, 0.0
        for piece in self._pieces:
            piece.add_up()
            began_s = clock()
            piece.update(piece.scratch)
            updating_s += clock() - began_s
        return updating_s
