"""Compares tensors by name, bit by bit: a NaN equals a NaN of the same bits, and -0.0 differs from 0.0."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sambasim.report.compare import tensor_difference
from sambasim.report.tables import Row
from sambasim.units import counted

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITH_ULPS = (torch.float32, torch.float16, torch.bfloat16)


def compare_tensors(a: Tensors, b: Tensors) -> tuple[int, list[Row]]:
    """The number of common tensors, and the differences: in the order of `a`, then tensors that only `b` has."""
    ours, theirs = dict(a), dict(b)
    pairs = ((name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*ours, *theirs)))
    return len(ours.keys() & theirs.keys()), list(filter(None, (_difference_of(*pair) for pair in pairs)))


def compare_files(
    kind: Literal["weights", "checkpoints", "files"],
    a: str,
    b: str,
    tensors: tuple[Tensors, Tensors],
    facts: Sequence[Row] = (),
) -> Row:
    common, differences = compare_tensors(*tensors)
    verdict = f"equal: {counted(common, 'tensor')}"
    if differences:
        rest = f"; {len(differences) - 1} more differ" if len(differences) > 1 else ""
        verdict = f"they first differ in {differences[0].name}: {tensor_difference(differences[0])}{rest}"
    elif facts:
        apart = ", ".join(f"{fact.name} {fact.a} and {fact.b}" for fact in facts)
        verdict = f"{counted(common, 'tensor')} equal, but not: {apart}"
    equal = not differences and not facts
    return Row(kind=kind, a=a, b=b, equal=equal, verdict=verdict, tensors=common, facts=facts, differences=differences)


def _difference_of(name: str, a: Tensor | None, b: Tensor | None) -> Row | None:
    """The largest differences are over elements that are finite in both; `largest_ulps` is None for float64."""

    def type_of(tensor: Tensor | None) -> str | None:
        """As `TensorType` is printed: `float32[3, 8]`."""
        return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    types = {"type_a": type_of(a), "type_b": type_of(b)}
    if a is None or b is None:
        why = "only in A" if b is None else "only in B"
    elif types["type_a"] != types["type_b"]:
        why = "type"
    else:
        values = _compare_values(*(tensor.detach().contiguous().reshape(-1) for tensor in (a, b)))
        return None if values is None else Row(name=name, why="values", **types, **values)
    largest = dict.fromkeys(("largest_absolute", "largest_relative", "largest_ulps"))
    return Row(name=name, why=why, **types, differing=0, elements=0, **largest, differing_not_finite=0)


def _compare_values(a: Tensor, b: Tensor) -> dict[str, int | float | None] | None:
    differing = not_finite = ulps = 0
    absolute, relative = None, 0.0
    for ours, theirs in zip(*(torch.split(tensor, 1 << 20) for tensor in (a, b)), strict=True):
        differs = _bits(ours) != _bits(theirs)
        if not bool(differs.any()):
            continue
        ours, theirs = ours[differs], theirs[differs]
        finite = torch.isfinite(ours.double()) & torch.isfinite(theirs.double())
        differing += ours.numel()
        not_finite += int((~finite).sum())
        ours, theirs = ours[finite], theirs[finite]
        if not ours.numel():
            continue
        distance = (ours.double() - theirs.double()).abs()
        size = torch.maximum(ours.double().abs(), theirs.double().abs()).clamp(min=torch.finfo(torch.float64).tiny)
        absolute = max(absolute or 0.0, float(distance.max()))
        relative = max(relative, float((distance / size).max()))
        if a.dtype in _WITH_ULPS:
            ulps = max(ulps, int((_in_order(ours) - _in_order(theirs)).abs().max()))
    if not differing:
        return None
    return {
        "differing": differing,
        "elements": a.numel(),
        "largest_absolute": absolute,
        "largest_relative": None if absolute is None else relative,
        "largest_ulps": None if absolute is None or a.dtype not in _WITH_ULPS else ulps,
        "differing_not_finite": not_finite,
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _in_order(tensor: Tensor) -> Tensor:
    """Integers that differ by 1 for neighbouring floating point numbers; 0.0 and -0.0 have the same one."""
    bits = _bits(tensor)
    wide = bits.long()
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)
