"""What every options class has in common."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sambasim.options.problems import Problem, Refused, show
from sambasim.options.targets import target_problem


class Options(BaseModel):
    """Frozen, and strict: unknown keys are refused, `"3"` is no number and `1` is not true."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _json_problems(value: object, name: str) -> Iterator[Problem]:
    """What in `value` JSON cannot hold."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _json_problems(inner, f"{name}.{key}" if name else key)
            else:
                yield Problem(name, "must have names that are text", given=show(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _json_problems(inner, name)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(name, "must be a finite number", given=str(value))
    elif value is not None and not isinstance(value, str | int | float):
        what = "must be text, a number, true or false, a list or a table"
        yield Problem(name, what, given=show(value))


def _json(value: dict[str, object]) -> dict[str, object]:
    problems = tuple(_json_problems(value, ""))
    if problems:
        raise Refused(*problems)
    return value


def _target(text: str) -> str:
    problem = target_problem(text)
    if problem:
        raise Refused(problem)
    return text


JsonTable = Annotated[dict[str, object], AfterValidator(_json)]
"""Anything that JSON can hold, by name: keyword arguments for something of the user's, as a PEF carries them."""

Target = Annotated[str, AfterValidator(_target)]
"""`package.module:name` or `path/file.py:name`."""

FilePath = Annotated[Path, Field(strict=False)]
"""A path, also where it is given as text."""

Seed = Annotated[int, Field(ge=0, lt=2**63)]
