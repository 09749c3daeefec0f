"""What every options class has in common, and what is said when an option is wrong.

A class yields a `Problem` for everything that does not fit together; pydantic finds the rest (a wrong type, a number
out of range, an unknown key). `explain` turns both into problems that name the option as it is written in TOML or after
`--set`, what was given, and what is allowed.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

LONGEST_VALUE = 60
"""Characters of a given value that a message shows."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong option. `name` is relative to the model whose validator found it, and may be empty."""

    name: str
    what: str
    remedy: str | None = None
    given: str | None = None


class Refused(ValueError):
    """Raised by validators; pydantic collects it, and `explain` lists its problems."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(f"{p.name}: {p.what}" if p.name else p.what for p in problems))
        self.problems = problems


class Options(BaseModel):
    """Frozen and strict: unknown keys are errors, `"3"` is not a number, and `1` is not true."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """What does not fit together, where each field by itself is valid."""
        yield from ()

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if problems := tuple(self.problems()):
            raise Refused(*problems)
        return self


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
        yield Problem(name, "must be text, a number, true or false, a list or a table", given=show(value))


def _json(value: dict[str, object]) -> dict[str, object]:
    if problems := tuple(_json_problems(value, "")):
        raise Refused(*problems)
    return value


JsonTable = Annotated[dict[str, object], AfterValidator(_json)]
"""Keyword arguments for code of the user: anything that JSON can hold, as a PEF stores them as JSON."""


def show(value: object) -> str:
    """A value as in TOML, shortened if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = json.dumps(str(value), ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that is most similar to `word`, or None if none is similar."""
    by_folded = {choice.casefold().replace("-", "_"): choice for choice in choices}
    found = difflib.get_close_matches(word.casefold().replace("-", "_"), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def one_of(choices: Iterable[str]) -> str:
    """`"a, b or c"`."""
    words = list(choices)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def explain(error: ValidationError, model_class: type[BaseModel]) -> list[Problem]:
    """Every problem that pydantic found, with the full dotted name of its option."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        # Without the index into a list: `betas = 1.0`, not `betas.1`.
        location = [part for part in item["loc"] if isinstance(part, str)]
        name = ".".join(location)
        context = item.get("ctx", {})
        refused = context.get("error")
        if isinstance(refused, Refused):
            problems += (
                Problem(".".join(filter(None, (name, p.name))), p.what, p.remedy, p.given) for p in refused.problems
            )
        elif item["type"] == "extra_forbidden":
            problems.append(_unknown(location, model_class))
        elif item["type"] == "missing" and isinstance(item["loc"][-1], int):
            problems.append(Problem(name, "has too few values", given=show(item["input"])))
        elif item["type"] == "missing":
            problems.append(Problem(name, "is missing", f"--set {name}=…"))
        elif item["type"] == "literal_error":
            problems.append(_not_one_of(name, str(context["expected"]), item["input"]))
        else:
            problems.append(Problem(name, _must(item["type"], context, item["msg"]), given=show(item["input"])))
    return problems


_KINDS = {
    "int_type": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "finite_number": "a finite number",
    "bool_type": "true or false", "string_type": "text", "path_type": "a path", "list_type": "a list",
    "dict_type": "a table", "model_type": "a table", "model_attributes_type": "a table",
    "tuple_type": "a list",
}  # fmt: skip
_LIMITS = {
    "greater_than_equal": ("at least", "ge"), "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"), "less_than": ("below", "lt"),
}  # fmt: skip


def _must(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        return f"must be {words} {context[key]:g}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}"
    return message[:1].lower() + message[1:]


def _not_one_of(name: str, expected: str, given: object) -> Problem:
    choices = re.findall(r"'([^']*)'", expected)
    guess = nearest(given, choices) if isinstance(given, str) else None
    return Problem(
        name,
        f"must be {one_of(choices)}",
        remedy=f"did you mean {guess}?" if guess else None,
        given=show(given),
    )


def _unknown(location: list[str], model_class: type[BaseModel]) -> Problem:
    *parents, word = location
    name = ".".join(location)
    inside: type[BaseModel] | None = model_class
    for part in parents:
        inside = _nested(inside, part) if inside else None
    siblings = list(inside.model_fields) if inside else []
    guess = nearest(word, siblings)
    full_names = list(dotted_names(model_class))
    if guess:
        guess = ".".join((*parents, guess))
    else:  # the right name in the wrong table: `training.lr`, or `lr` alone
        guess = next((full for full in full_names if full.rpartition(".")[2] == word.replace("-", "_")), None)
    if guess:
        return Problem(name, "is not an option", f"did you mean {guess}?")
    table = ".".join(parents)
    known = f"[{table}] takes" if table else "the tables and names are"
    return Problem(name, f"is not an option; {known} {', '.join(siblings)}")


def _nested(model_class: type[BaseModel], field: str) -> type[BaseModel] | None:
    """The options class of a field that may be None too; None for any other field."""
    info = model_class.model_fields.get(field)
    annotation = info.annotation if info else None
    candidates = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def dotted_names(model_class: type[BaseModel]) -> Iterator[str]:
    """Every option of a class and of its tables: `training.schedule.name`."""
    for field in model_class.model_fields:
        nested = _nested(model_class, field)
        if nested is None:
            yield field
        else:
            yield from (f"{field}.{name}" for name in dotted_names(nested))
