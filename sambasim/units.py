"""Parse and format quantities. Inside sambasim every quantity is in SI base units, and its name ends in the unit
(`size_bytes`, `step_s`)."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
KILO, MEGA, GIGA, TERA = 10**3, 10**6, 10**9, 10**12
MICROSECOND_S = 1e-6

_WHOLE = 100  # a rate from here on needs no digits behind the point
_BYTE_UNITS = {
    "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "KB": KILO, "MB": MEGA, "GB": GIGA, "TB": TERA,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`"64 MiB"` -> 67108864. A bare number is bytes. Raises ValueError on anything else."""
    match = _QUANTITY.fullmatch(text)
    unit = (match.group(2) or "B") if match else ""
    if match is None or unit not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not a size; write a number and one of {', '.join(_BYTE_UNITS)}")
    size_bytes = float(match.group(1)) * _BYTE_UNITS[unit]
    if math.isinf(size_bytes):
        raise ValueError(f"{text!r} is too large")
    return round(size_bytes)


def _scaled(number: float, units: Mapping[str, int]) -> str | None:
    return next((f"{number / factor:.1f} {name}" for name, factor in units.items() if number >= factor), None)


def format_bytes(size_bytes: float) -> str:
    """67108864 -> `"64.0 MiB"`; exact below one KiB."""
    return _scaled(size_bytes, {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}) or f"{size_bytes:.0f} B"


def format_seconds(time_s: float) -> str:
    """0.0123 -> `"12.3 ms"`."""
    if time_s >= 1:
        return f"{time_s:.2f} s"
    return f"{time_s * 1e3:.1f} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.1f} us"


def format_count(count: float) -> str:
    """124439808 -> `"124.4 M"`; exact below one thousand."""
    return _scaled(count, {"T": TERA, "G": GIGA, "M": MEGA, "k": KILO}) or f"{count:.0f}"


def format_rate(per_s: float) -> str:
    """1.2345 -> `"1.23"`; as `format_count` from one hundred on."""
    return format_count(per_s) if per_s >= _WHOLE else f"{per_s:.3g}"


def plain_rate(per_s: float) -> str:
    """1.2345 -> `"1.23"`, 1234567 -> `"1,234,567"`: for columns whose lines are compared."""
    return f"{per_s:,.0f}" if per_s >= _WHOLE else f"{per_s:.3g}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 45 more`: the names, or the first of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def numbered(noun: str, numbers: Iterable[object]) -> str:
    """`rank 1`, or `ranks 0, 1 and 3`."""
    *several, last = map(str, numbers)
    return f"{noun}s {', '.join(several)} and {last}" if several else f"{noun} {last}"
