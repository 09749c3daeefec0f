"""What all options are: frozen, strict models, their problems, and one error for all of these, with their remedies."""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sambasim.errors import LARGEST_COUNT, MOST_REPLICAS, OptionError

M = TypeVar("M", bound=BaseModel)

LONGEST_VALUE = 60

FilePath: TypeAlias = Annotated[Path, Field(strict=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Replicas: TypeAlias = Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong option. `name`: relative to the model whose validator found it, or empty; `given`: `...` for none."""

    name: str
    what: str
    remedy: str | None = None
    given: object = ...


class Given(NamedTuple):
    """A value that was given on the command line, or None to remove the option, and what was typed there."""

    path: Sequence[str]
    value: object
    origin: str


class Refused(ValueError):
    """Raised by validators; pydantic collects it, and `build` lists its problems."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(": ".join(filter(None, (p.name, p.what))) for p in problems))
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


def broken(*rules: tuple[Any, ...]) -> Iterator[Problem]:
    """Of rules, each a condition and the fields of a Problem, the problems of those whose condition is true."""
    return (Problem(*problem) for is_broken, *problem in rules if is_broken)


def parsable(parse: Callable[[Any], object]) -> AfterValidator:
    """A validator of values, except None, that `parse` refuses."""

    def check(value: Any) -> Any:
        if value is not None:
            parse(value)
        return value

    return AfterValidator(check)


def checked(problems_of: Callable[[Any], Iterator[Problem]]) -> AfterValidator:
    """A validator of values, except None, that have problems."""

    def parse(value: Any) -> None:
        if problems := tuple(problems_of(value)):
            raise Refused(*problems)

    return parsable(parse)


def _json_problems(value: object, name: str = "") -> Iterator[Problem]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _json_problems(inner, f"{name}.{key}" if name else key)
            else:
                yield Problem(name, "must have names that are text", given=key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _json_problems(inner, name)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(name, "must be a finite number", given=value)
    elif value is not None and not isinstance(value, str | int | float):
        yield Problem(name, "must be text, a number, true or false, a list or a table", given=value)


JsonTable = Annotated[dict[str, object], checked(_json_problems)]
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
    """The remedy if a file beside `path` has a similar name, and its ending, or `suffix` if it has none."""
    ending = path.suffix or suffix
    guess = nearest(path.stem, [file.stem for file in path.parent.glob(f"*{ending}") if file.is_file()])
    return did_you_mean(None if guess is None else str(path.with_name(f"{guess}{ending}")))


def did_you_mean(guess: str | None) -> str | None:
    return f"did you mean {guess}?" if guess else None


def suggested(word: str, choices: Iterable[str]) -> str | None:
    """The remedy for `word`, which is none of `choices`, if one of them is similar."""
    return did_you_mean(nearest(word, choices))


def one_of(choices: Iterable[str]) -> str:
    """`"a, b or c"`."""
    words = list(choices)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def build(
    model_class: type[M], mapping: Mapping[str, object], *, where: str | None = None, given: Sequence[Given] = ()
) -> M:
    """An instance from plain data; `where`: its file, `given`: what was typed. Raises OptionError for all problems."""
    origins = {".".join(path): origin for path, _, origin in given}
    try:
        return model_class.model_validate(mapping)
    except ValidationError as error:
        raise refusal(_explain(error, model_class, origins), where=where, origins=origins) from None


def refusal(
    problems: Sequence[Problem], *, where: str | None = None, origins: Mapping[str, str] = MappingProxyType({})
) -> OptionError:
    """One error for all problems. It names the file `where`, unless all of them come from the command line. `origins`:
    where options were given, by dotted name."""
    lines, where_else = [], None
    for problem in problems:
        origin = _origin(problem.name, origins)
        where_else = where_else if origin else where
        given = f" = {show(problem.given)}" if problem.given is not ... else ""
        name = problem.name.removeprefix("overrides.")  # the overrides of a run have the names of a config
        lines.append(f"{name}{given}{origin and f' (from {origin})'}: {problem.what}" if name else problem.what)
    if len(problems) == 1:
        return OptionError(lines[0], where=where_else, remedy=problems[0].remedy)
    each = [f"{line} ({p.remedy})" if p.remedy else line for p, line in zip(problems, lines, strict=True)]
    what = "\n    ".join((f"{len(problems)} options are wrong:", *each))
    return OptionError(what, where=where_else, remedy="correct each of them; --set NAME=VALUE overrides the config")


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Where `name` comes from, or a table that it is in, or, if it is a table, the first option in it; else empty."""
    parts = name.replace('"', "").split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    inside = [option for option in origins if option.startswith(f"{name}.")]
    return next((origins[option] for option in (*prefixes, *inside) if option in origins), "")


def _explain(error: ValidationError, model_class: type[BaseModel], origins: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        # Without the index into a list: `betas = 1.0`, not `betas.1`.
        location = [part for part in item["loc"] if isinstance(part, str)]
        name, kind, context, value = ".".join(location), item["type"], item.get("ctx", {}), item["input"]
        remedy: str | None = None
        if isinstance(refused := context.get("error"), Refused):
            problems += (replace(p, name=".".join(filter(None, (name, p.name)))) for p in refused.problems)
            continue
        if kind == "extra_forbidden":
            problems.append(_unknown(location, model_class))
            continue
        if kind == "missing" and isinstance(item["loc"][-1], int):
            what = "has too few values"
        elif kind == "missing":
            what, remedy, value = "is missing", _MISSING.get(name, f"--set {name}=…"), ...
        elif kind == "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"])
            what = f"must be {one_of(choices)}"
            remedy = suggested(value, choices) if isinstance(value, str) else None
        elif kind in _LIMITS:
            words, limit = _LIMITS[kind][0], context[_LIMITS[kind][1]]
            what = f"must be {words} {f'{limit:,}' if isinstance(limit, int) else f'{limit:,.10g}'}"
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
    "greater_than_equal": ("at least", "ge"), "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"), "less_than": ("below", "lt"),
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
    candidates = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def dotted_names(model_class: type[BaseModel]) -> Iterator[str]:
    for field in model_class.model_fields:
        nested = _nested(model_class, field)
        yield from [field] if nested is None else (f"{field}.{name}" for name in dotted_names(nested))
