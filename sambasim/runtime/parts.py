"""Tensors that are cut over the ranks of a mesh: a rank's part of one, and the whole from all parts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sambasim.ir.types import Cut


def part(whole: Tensor, cut: Cut, position: int) -> Tensor:
    """The part of the rank at `position` along the axis of `cut`: a view, unless the dimension is several tensors."""
    shape, dim = whole.shape, cut.dim
    parts = whole.reshape(*shape[:dim], cut.outer, cut.parts, -1, *shape[dim + 1 :]).select(dim + 1, position)
    return parts.flatten(dim, dim + 1)


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole tensor, from its parts in the order of ranks."""
    shape, dim = parts[0].shape, cut.dim
    outer = [one.reshape(*shape[:dim], cut.outer, -1, *shape[dim + 1 :]) for one in parts]
    return torch.stack(outer, dim + 1).flatten(dim, dim + 2)


def part_of(whole: Tensor, cuts: Sequence[Cut], at: Mapping[str, int]) -> Tensor:
    """The part that a rank with the coordinates `at` holds of a tensor."""
    for cut in cuts:
        whole = part(whole, cut, at[cut.axis])
    return whole
