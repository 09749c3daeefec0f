"""The version that a file states: MAJOR.MINOR. A reader takes every minor version of its major up to its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from sambasim import __version__

_MOST_DIGITS = 9
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Unread:
    """Why a file is not read. `writer` is the program to read it with; None if what it states is no version at all."""

    what: str
    writer: str | None


def unread(fields: Mapping[str, object], kind: str, own: tuple[int, int]) -> Unread | None:
    """What is wrong with the keys `version` and `writer` of a file of `kind`, for a reader of version `own`."""
    version, writer = fields.get("version"), fields.get("writer")
    numbers = version.split(".") if isinstance(version, str) else []
    if not (len(numbers) == 2 and all(n.isascii() and n.isdigit() and len(n) <= _MOST_DIGITS for n in numbers)):
        return Unread(f"its format version is {str(version)[:_SHOWN]!r}, which is no version", None)
    major, minor = map(int, numbers)
    own_major, own_minor = own
    if major == own_major and minor <= own_minor:
        return None
    by = str(writer)[:_SHOWN] if isinstance(writer, str) and writer.isprintable() else "an unknown program"
    what = (
        f"it is a {kind} of format {major}.{minor}, written by {by}; "
        f"sambasim {__version__} reads format {own_major}.0 to {own_major}.{own_minor}"
    )
    return Unread(what, by)
