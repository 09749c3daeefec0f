"""What all options are: frozen, strict models; and what pydantic finds wrong in them, in words and with remedies."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import UnionType
from typing import ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from sambasim.options.problem import (
    LONGEST_VALUE,
    Given,
    Problem,
    Refused,
    did_you_mean,
    nearest,
    one_of,
    refusal,
    suggested,
)

M = TypeVar("M", bound=BaseModel)


class Options(BaseModel):
    """Frozen and strict: unknown keys are errors, `"3"` is not a number, and `1` is not true."""

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


def build(
    model_class: type[M], mapping: Mapping[str, object], *, where: str | None = None, given: Sequence[Given] = ()
) -> M:
    """An instance from plain data; `where`: its file, `given`: what was typed. Raises OptionError for all problems."""
    origins = {entry.name: entry.origin for entry in given}
    try:
        return model_class.model_validate(mapping)
    except ValidationError as error:
        raise refusal(_explain(error, model_class, origins), where=where, origins=origins) from None


def _explain(error: ValidationError, model_class: type[BaseModel], origins: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        # Without the index into a list: `betas = 1.0`, not `betas.1`.
        location = [part for part in item["loc"] if isinstance(part, str)]
        name, kind, context, value = ".".join(location), item["type"], item.get("ctx", {}), item["input"]
        remedy: str | None = None
        if isinstance(refused := context.get("error"), Refused):
            problems += (p._replace(name=".".join(filter(None, (name, p.name)))) for p in refused.problems)
            continue
        if kind == "extra_forbidden":
            problems.append(_unknown(location, model_class))
            continue
        is_in_list = any(isinstance(part, int) for part in item["loc"])
        if kind == "too_short" or (kind == "missing" and isinstance(item["loc"][-1], int)):
            what = "has too few values"
        elif kind == "missing":
            what, value = "is missing", ...
            remedy = f"write {location[-1]} = …" if is_in_list else _MISSING.get(name, f"--set {name}=…")
        elif kind == "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"])
            what = f"must be {one_of(choices)}"
            remedy = suggested(value, choices) if isinstance(value, str) else None
        elif kind in _LIMITS:
            (limit,) = context.values()
            what = f"must be {_LIMITS[kind]} {f'{limit:,}' if isinstance(limit, int) else f'{limit:,.10g}'}"
            remedy = _at_limit(name, kind, limit, origins)
        else:
            kind = "finite_number" if kind == "float_type" and type(value) is int else kind  # too large for a float
            what = f"must be {_KINDS[kind]}" if kind in _KINDS else item["msg"][:1].lower() + item["msg"][1:]
            remedy = _without_quotes(location, kind, value)
        problems.append(Problem(name, what, remedy, value))
    return problems


_MISSING = {"optimizer.name": "--set optimizer.name=adamw", "loss.name": "--set loss.name=cross_entropy"}
_KINDS = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text", "path_type": "a path",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "a table", "model_type": "a table",
    "model_attributes_type": "a table",
}  # fmt: skip
_LIMITS = {
    "greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most", "less_than": "below",
}  # fmt: skip


def _at_limit(name: str, kind: str, limit: float, origins: Mapping[str, str]) -> str | None:
    """The remedy for a whole number beyond `limit`, as it is typed."""
    if not (kind.endswith("_equal") and isinstance(limit, int)):
        return None
    flag = origins.get(name, "--set")
    return f"--set {name.removeprefix('overrides.')}={limit}" if flag == "--set" else f"{flag} {limit}"


def _without_quotes(location: Sequence[str], kind: str, given: object) -> str | None:
    """The remedy for a number, or for true or false, that was given as text."""
    kinds = {"float_type": (float, int), "int_type": (int,), "bool_type": (bool,)}.get(kind, ())
    if isinstance(given, str) and len(given) <= LONGEST_VALUE:
        with suppress(ValueError):
            if type(tomllib.loads(f"value = {given}")["value"]) in kinds:
                return f"write it without quotes: {location[-1]} = {given}"
    return None


def _unknown(location: list[str], model_class: type[BaseModel]) -> Problem:
    *parents, word = location
    name, table = ".".join(location), ".".join(parents)
    inside: type[BaseModel] | None = model_class
    for part in parents:
        inside = _nested(inside, part) if inside else None
    siblings = list(inside.model_fields) if inside else []
    # A similar name in this table, or the same one in another: `training.lr`, or `lr` alone.
    same = (full for full in dotted_names(model_class) if full.rpartition(".")[2] == word.replace("-", "_"))
    near = nearest(word, siblings)
    if guess := ".".join((*parents, near)) if near else next(same, None):
        return Problem(name, "is not an option", did_you_mean(guess))
    known = f"[{table}] takes" if table else "the tables and names are"
    return Problem(name, f"is not an option; {known} {', '.join(siblings)}")


def _nested(model_class: type[BaseModel], field: str) -> type[BaseModel] | None:
    info = model_class.model_fields.get(field)
    annotation = info.annotation if info else None
    candidates = get_args(annotation) if get_origin(annotation) in (Union, UnionType, tuple) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def dotted_names(model_class: type[BaseModel]) -> Iterator[str]:
    for field in model_class.model_fields:
        nested = _nested(model_class, field)
        yield from [field] if nested is None else (f"{field}.{name}" for name in dotted_names(nested))
