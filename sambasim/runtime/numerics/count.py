"""What of a tensor is not finite."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Count:
    """Of `total` elements, how many are NaN, and how many infinite."""

    nan: int
    infinite: int
    total: int

    @property
    def finite(self) -> bool:
        return not (self.nan or self.infinite)

    @property
    def word(self) -> str:
        """What the worst of it is."""
        return "nan" if self.nan else "inf"

    def __str__(self) -> str:
        parts = [f"{self.nan} nan"] * bool(self.nan) + [f"{self.infinite} inf"] * bool(self.infinite)
        return f"{' and '.join(parts) or 'nothing'} of {self.total} element{'s' * (self.total != 1)}"


def count(tensor: Tensor) -> Count:
    """Whole numbers are always finite."""
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return Count(0, 0, tensor.numel())
    return Count(int(tensor.isnan().sum()), int(tensor.isinf().sum()), tensor.numel())
