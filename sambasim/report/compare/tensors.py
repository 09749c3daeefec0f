"""Where two sets of tensors differ: which, in how many elements, and by how much.

Elements are compared by their bits: a NaN equals one of the same bits, and -0.0 is not 0.0. What is said of sizes is
worked out in float64, a piece at a time, so that it takes little memory beside the tensors.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sambasim.report.compare.result import Fact, TensorApart, TensorsCompared

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_PIECE_ELEMENTS = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: the integer that has its bits."""

_TINY = torch.finfo(torch.float64).tiny
_WITH_ULPS = (torch.float32, torch.float16, torch.bfloat16)


def compare_tensors(a: Tensors, b: Tensors) -> tuple[int, tuple[TensorApart, ...]]:
    """How many tensors both have, and what differs: in the order of `a`, then what only `b` has."""
    ours, theirs = dict(a), dict(b)
    apart = [_compared(name, tensor, theirs.get(name)) for name, tensor in ours.items()]
    apart += [_compared(name, None, tensor) for name, tensor in theirs.items() if name not in ours]
    return len(ours.keys() & theirs.keys()), tuple(one for one in apart if one is not None)


def compare_files(
    kind: str, a: str, b: str, tensors: tuple[Tensors, Tensors], facts: tuple[Fact, ...] = ()
) -> TensorsCompared:
    """Two files of tensors, called `a` and `b`. `kind` is "weights" or "checkpoints", and `facts` what else differs."""
    common, apart = compare_tensors(*tensors)
    return TensorsCompared.model_validate(
        {
            "kind": kind,
            "a": a,
            "b": b,
            "alike": not apart and not facts,
            "verdict": _verdict(common, apart, facts),
            "tensors": common,
            "facts": facts,
            "apart": apart,
        }
    )


def told(one: TensorApart) -> str:
    """By how much a tensor differs, in words."""
    if one.why in ("only in A", "only in B"):
        return f"{one.why}, {one.type_a or one.type_b}"
    if one.why == "type":
        return f"{one.type_a} in A, {one.type_b} in B"
    parts = [f"{one.differing:,} of {one.of:,} elements"]
    if one.largest_absolute is not None:
        parts.append(f"by {one.largest_absolute:.3g} at most (relative {one.largest_relative:.2g})")
    if one.largest_ulps is not None:
        parts.append(f"{one.largest_ulps:,} ULP" + ("" if one.largest_ulps == 1 else "s"))
    if one.not_finite_apart:
        parts.append(f"{one.not_finite_apart:,} of them not finite")
    return ", ".join(parts)


def type_of(tensor: Tensor) -> str:
    """As `TensorType` writes it: `float32[3, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _verdict(common: int, apart: tuple[TensorApart, ...], facts: tuple[Fact, ...]) -> str:
    if apart:
        first = apart[0]
        rest = f"; {len(apart) - 1} more differ" if len(apart) > 1 else ""
        return f"they differ first in {first.name}: {told(first)}{rest}"
    tensors = f"{common:,} tensor{'' if common == 1 else 's'}"
    if facts:
        return f"{tensors} alike, and other facts: " + ", ".join(f"{one.name} {one.a} and {one.b}" for one in facts)
    return f"alike: {tensors}"


def _compared(name: str, a: Tensor | None, b: Tensor | None) -> TensorApart | None:
    """None if they are alike in all bits."""
    types = (None if a is None else type_of(a), None if b is None else type_of(b))
    if a is None or b is None:
        return TensorApart(name=name, why="only in A" if b is None else "only in B", type_a=types[0], type_b=types[1])
    if types[0] != types[1]:
        return TensorApart(name=name, why="type", type_a=types[0], type_b=types[1])
    return _values(name, types[0] or "", a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1))


def _values(name: str, type_: str, a: Tensor, b: Tensor) -> TensorApart | None:
    differing = not_finite = 0
    absolute: float | None = None
    relative: float | None = None
    ulps = 0 if a.dtype in _WITH_ULPS else None
    for start in range(0, a.numel(), _PIECE_ELEMENTS):
        ours, theirs = a[start : start + _PIECE_ELEMENTS], b[start : start + _PIECE_ELEMENTS]
        other = _bits(ours) != _bits(theirs)
        if not bool(other.any()):
            continue
        ours, theirs = ours[other], theirs[other]
        one, another = ours.double(), theirs.double()
        finite = torch.isfinite(one) & torch.isfinite(another)
        differing += ours.numel()
        not_finite += int((~finite).sum())
        one, another = one[finite], another[finite]
        if not one.numel():
            continue
        distance = (one - another).abs()
        size = torch.maximum(one.abs(), another.abs()).clamp(min=_TINY)
        absolute = max(absolute or 0.0, float(distance.max()))
        relative = max(relative or 0.0, float((distance / size).max()))
        if ulps is not None:
            ulps = max(ulps, int((_in_order(ours[finite]) - _in_order(theirs[finite])).abs().max()))
    if not differing:
        return None
    return TensorApart(
        name=name,
        why="values",
        type_a=type_,
        type_b=type_,
        differing=differing,
        of=a.numel(),
        largest_absolute=absolute,
        largest_relative=relative,
        largest_ulps=None if absolute is None else ulps,
        not_finite_apart=not_finite,
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _in_order(tensor: Tensor) -> Tensor:
    """Numbers that lie one apart where floating point numbers are neighbours; 0.0 and -0.0 are the same one."""
    bits = _bits(tensor)
    wide = bits.long()
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)
