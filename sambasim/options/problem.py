"""Problems of options, and types of values with their checks. Nothing here imports pydantic, which takes 0.2 s: a
command line is read without it."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias

from sambasim.errors import LARGEST_COUNT, LARGEST_FACTOR, MOST_REPLICAS, OptionError

LONGEST_VALUE = 60


class Problem(NamedTuple):
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

    @property
    def name(self) -> str:
        return ".".join(self.path)


class Refused(ValueError):
    """Raised by validators; pydantic collects it, and `build` lists its problems."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(": ".join(filter(None, (p.name, p.what))) for p in problems))
        self.problems = problems


def broken(*rules: tuple[Any, ...]) -> Iterator[Problem]:
    """Of rules, each a condition and the fields of a Problem, the problems of those whose condition is true."""
    return (Problem(*problem) for is_broken, *problem in rules if is_broken)


class Later:
    """Metadata of a field, `pydantic.NAME(…)`, made when pydantic asks for it: it iterates over metadata with the first
    attribute. Of `Field`, only constraints and strictness count."""

    __is_annotated_types_grouped_metadata__ = True

    def __init__(self, name: str, *arguments: object, **keywords: object) -> None:
        self._name, self._arguments, self._keywords = name, arguments, keywords

    def __iter__(self) -> Iterator[object]:
        import pydantic

        made = getattr(pydantic, self._name)(*self._arguments, **self._keywords)
        return iter(getattr(made, "metadata", [made]))


limits, after, before = (partial(Later, kind) for kind in ("Field", "AfterValidator", "BeforeValidator"))


def parsable(parse: Callable[[Any], object]) -> Later:
    """A validator of values, except None, that `parse` refuses."""

    def check(value: Any) -> Any:
        if value is not None:
            parse(value)
        return value

    return after(check)


def checked(problems_of: Callable[[Any], Iterator[Problem]]) -> Later:
    """A validator of values, except None, that have problems."""

    def parse(value: Any) -> None:
        if problems := tuple(problems_of(value)):
            raise Refused(*problems)

    return parsable(parse)


FilePath: TypeAlias = Annotated[Path, Later("Field", strict=False)]
Count: TypeAlias = Annotated[int, limits(ge=1, le=LARGEST_COUNT)]
Replicas: TypeAlias = Annotated[int, limits(ge=1, le=MOST_REPLICAS)]
Factor: TypeAlias = Annotated[float, limits(ge=0, le=LARGEST_FACTOR)]
PositiveFactor: TypeAlias = Annotated[float, limits(gt=0, le=LARGEST_FACTOR)]
Text: TypeAlias = Annotated[str, limits(min_length=1)]


def show(value: object) -> str:
    """A value as in TOML, shortened if it is long."""
    import json  # which a command line without mistakes of values does not need

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
