"""Writing figures to a JSON file."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from sambasim.errors import OptionError


def write_json(path: str | os.PathLike[str], figures: Mapping[str, JsonValue]) -> None:
    """`figures` as one line of JSON. Raises OptionError if the file cannot be written."""
    try:
        Path(path).write_text(f"{json.dumps(figures)}\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}", remedy="give another file") from error


def as_json(number: float) -> float | str:
    """`number`; infinity and NaN, which JSON does not have, as text."""
    return number if math.isfinite(number) else str(number)
