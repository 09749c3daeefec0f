"""What one sample gives to one input of a model: `float32[1, 8, 8]`, or `int64[] < 10` for a label of ten classes.

The shape is that of one sample, without the batch. The bound is exclusive: synthetic data stays below it, so that a
class index or a token stays one that the model knows.
"""

import re
from dataclasses import dataclass
from math import prod

from sambasim.options.problems import Problem, Refused, nearest, one_of, show

FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
INTEGER_LARGEST = {"int64": 2**63 - 1, "int32": 2**31 - 1, "int16": 2**15 - 1, "int8": 2**7 - 1, "uint8": 2**8 - 1}
DTYPES = (*FLOAT_DTYPES, *INTEGER_LARGEST, "bool")
"""The dtypes that a PEF can hold; a test keeps them equal to those of `ir`."""

_SPEC = re.compile(r"\s*(\w+)\s*\[\s*((?:\d+\s*(?:,\s*\d+\s*)*,?\s*)?)\]\s*(?:<\s*(\d+)\s*)?")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The dtype and shape that one sample has for input `name`; `exclusive_bound` for integers, where it is known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    exclusive_bound: int | None = None

    def __str__(self) -> str:
        bound = "" if self.exclusive_bound is None else f" < {self.exclusive_bound}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{bound}"

    @property
    def numel(self) -> int:
        """Elements of one sample."""
        return prod(self.shape)


def parse_input(name: str, text: str) -> InputSpec:
    """`parse_input("target", "int64[] < 10")` -> the spec. Raises Refused, a ValueError that says what is allowed."""

    def refuse(what: str, remedy: str | None = None) -> Refused:
        return Refused(Problem(name, what, remedy, show(text)))

    match = _SPEC.fullmatch(text)
    if match is None:
        raise refuse("must be a dtype and the shape of one sample: float32[784], or int64[] < 10 for a class index")
    dtype, extents, bound_text = match.groups()
    if dtype not in DTYPES:
        guess = nearest(dtype, DTYPES)
        raise refuse(f"has the dtype {dtype}; it must be {one_of(DTYPES)}", f"did you mean {guess}?" if guess else None)
    shape = tuple(int(extent) for extent in extents.split(",") if extent.strip())
    if 0 in shape:
        raise refuse("must have at least one element along each axis")
    bound = None if bound_text is None else int(bound_text)
    if bound is not None and dtype not in INTEGER_LARGEST:
        raise refuse(f"has a bound, but only whole numbers have one, and {dtype} has none")
    if bound is not None and not 1 <= bound <= INTEGER_LARGEST[dtype]:
        raise refuse(f"must have a bound from 1 to {INTEGER_LARGEST[dtype]}")
    return InputSpec(name, dtype, shape, bound)
