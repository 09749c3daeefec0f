"""What all options are: frozen and strict models, the problems that they have, and the words for them."""

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sambasim.bounded import LARGEST_COUNT, MOST_REPLICAS

LONGEST_VALUE = 60

FilePath: TypeAlias = Annotated[Path, Field(strict=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Replicas: TypeAlias = Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong option. `name` is relative to the model whose validator found it, and may be empty."""

    name: str
    what: str
    remedy: str | None = None
    given: str | None = None


class Given(NamedTuple):
    """A value that was given on the command line, or None to remove the option, and what was typed there."""

    path: Sequence[str]
    value: object
    origin: str


class Refused(ValueError):
    """Raised by validators; pydantic collects it, and `build` lists its problems."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(f"{p.name}: {p.what}" if p.name else p.what for p in problems))
        self.problems = problems


class Options(BaseModel):
    """Frozen and strict: unknown keys are errors, `"3"` is not a number, and `1` is not true. The docstring below a
    field with a Flag is its help; `panel`: where help shows it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)
    panel: ClassVar[str]

    def problems(self) -> Iterator[Problem]:
        """What does not fit together, where each field by itself is valid."""
        yield from ()

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if problems := tuple(self.problems()):
            raise Refused(*problems)
        return self


def _json_problems(value: object, name: str) -> Iterator[Problem]:
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
        yield Problem(name, "must be text, a number, true or false, a list or a table", given=show(value))


def _json(value: dict[str, object]) -> dict[str, object]:
    if problems := tuple(_json_problems(value, "")):
        raise Refused(*problems)
    return value


JsonTable = Annotated[dict[str, object], AfterValidator(_json)]
"""Keyword arguments for code of the user: anything that JSON can hold, as a PEF stores them as JSON."""


def show(value: object) -> str:
    """A value as in TOML, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    by_folded = {choice.casefold().replace("-", "_"): choice for choice in choices}
    matches = difflib.get_close_matches(word.casefold().replace("-", "_"), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def near_file(path: Path, suffix: str = "") -> str | None:
    """A file beside `path` with a similar name, and its ending, or `suffix` if it has none."""
    ending = path.suffix or suffix
    guess = nearest(path.stem, [file.stem for file in path.parent.glob(f"*{ending}") if file.is_file()])
    return None if guess is None else str(path.with_name(f"{guess}{ending}"))


def did_you_mean(guess: str | None) -> str | None:
    return f"did you mean {guess}?" if guess else None


def one_of(choices: Iterable[str]) -> str:
    """`"a, b or c"`."""
    words = list(choices)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
