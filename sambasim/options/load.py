"""Options from text: TOML files and `--set`, and every mistake in them told at once."""

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sambasim.bounded import LARGEST_TOML_BYTES, nests_too_deeply, read_text, shortened
from sambasim.errors import OptionError
from sambasim.options.problems import Problem, explain, show
from sambasim.options.targets import absolute_source, absolute_target

M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path) -> dict[str, object]:
    """The tables of a TOML file. Raises OptionError, with the line, if it cannot be read or is not TOML."""
    try:
        text = read_text(path, LARGEST_TOML_BYTES)
    except FileNotFoundError:
        raise OptionError(f"there is no config file {path}", remedy="check the path after --config") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"the config file {path} cannot be read: {reason}", remedy="--config FILE.toml") from None
    try:
        tables = tomllib.loads(text)
        if nests_too_deeply(tables):
            raise RecursionError
        return tables
    except RecursionError:
        raise OptionError(f"the config {path} is nested too deeply", remedy="correct it there") from None
    except tomllib.TOMLDecodeError as error:
        reason, _, position = str(error).partition(" (at ")
        lines = text.splitlines()
        found = re.match(r"line (\d+)", position)
        number = int(found.group(1)) if found else max(len(lines), 1)
        code = lines[number - 1].strip() if number <= len(lines) else ""
        raise OptionError(
            f"the config is not valid TOML: {shortened(reason[:1].lower() + reason[1:])}",
            where=f"{path}:{number}: {shortened(code)}",
            remedy="correct that line",
        ) from None


def apply_overrides(mapping: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """A copy of `mapping` with each `NAME=VALUE` set in it: `"optimizer.lr=1e-3"`, `"training.schedule.name=cosine"`.

    The value is TOML; a word that is no TOML value is taken as text, so that quotes may be left out. An empty value
    takes the name away, and its default applies. Raises OptionError if there is no `=`, if the name is none, or if it
    leads through something that is no table.
    """
    result = copy.deepcopy(dict(mapping))
    for override in overrides:
        _, equals, text = override.partition("=")
        if not equals:
            raise OptionError(f"--set {override} has no value", remedy=f"--set {override}=VALUE")
        path = override_name(override)
        if text.strip():
            _assign(result, path, _value(text.strip(), override), f"--set {override}")
        else:
            _assign(result, path, None, f"--set {override}")
    return result


def apply_flags(
    mapping: Mapping[str, object], flags: Mapping[str, object], known: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, object], dict[str, str]]:
    """A copy of `mapping` with each flag that was given set in it, and the origins of these for `build`.

    `known` holds, for each keyword, the flag as it is typed and the dotted name that it sets. A flag that is None was
    not given. Raises OptionError for a keyword that is not known.
    """
    result = copy.deepcopy(dict(mapping))
    origins: dict[str, str] = {}
    for keyword, value in flags.items():
        if keyword not in known:
            raise refusal([Problem(keyword, f"is no flag; they are {', '.join(known)}")])
        flag, name = known[keyword]
        if value is not None:
            _assign(result, name.split("."), value, flag)
            origins[name] = flag
    return result, origins


def absolute_names(mapping: Mapping[str, object], folder: Path) -> dict[str, object]:
    """A copy of `mapping` in which the model's, the data's and the loss's files are seen from `folder`."""
    result = copy.deepcopy(dict(mapping))
    for table_name, key, absolute in (
        ("model", "target", absolute_target),
        ("data", "source", absolute_source),
        ("loss", "name", absolute_target),
    ):
        table = result.get(table_name)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = absolute(table[key], folder)
    return result


def _assign(mapping: dict[str, object], path: Sequence[str], value: object, typed: str) -> None:
    """Sets the value at `path`, or takes it away where it is None. Tables on the way are made."""
    *tables, last = path
    table = mapping
    for depth, part in enumerate(tables):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            name = ".".join(tables[: depth + 1])
            raise OptionError(f"{typed} cannot be: {name} is {show(inner)}, and no table")
        table = inner
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def override_name(override: str) -> list[str]:
    """`"model.args.depth=3"` -> `["model", "args", "depth"]`. Raises OptionError if it has no name."""
    name = override.partition("=")[0]
    try:
        inner: object = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        raise OptionError(f"--set {override} has no name that can be set", remedy="--set optimizer.lr=1e-3") from None
    parts: list[str] = []
    while isinstance(inner, dict) and len(inner) == 1:
        [(part, inner)] = inner.items()
        parts.append(part)
    if not parts or inner != 0:
        raise OptionError(f"--set {override} has no name that can be set", remedy="--set optimizer.lr=1e-3")
    return parts


def _value(text: str, override: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[0] not in "\"'[{":
            return text  # a bare word
        reason = str(error).partition(" (at ")[0]
        raise OptionError(
            f"--set {override} has a value that is not TOML: {reason[:1].lower()}{reason[1:]}",
            remedy="close what is open, and put single quotes around the whole for the shell",
        ) from None
    return parsed["value"] if len(parsed) == 1 else text


def build(
    model_class: type[M],
    mapping: Mapping[str, object],
    *,
    where: str | None = None,
    origins: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
) -> M:
    """An instance of an options class from plain data.

    `origins` says, by dotted name, what a value was typed as (`--batch-size`), and `config` what the file `where` says,
    for the message. Raises one OptionError that lists every problem: its dotted name, what was given, what is allowed,
    and the nearest name for an unknown one.
    """
    try:
        return model_class.model_validate(mapping)
    except ValidationError as error:
        raise refusal(explain(error, model_class), where=where, origins=origins, config=config) from None


def refusal(
    problems: Sequence[Problem],
    *,
    where: str | None = None,
    origins: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
) -> OptionError:
    """One error for all problems. `where` is told unless each of them was typed on the command line, and there alone:
    a name that is none may stand in the `config` too."""
    typed = [_origin(problem.name, origins or {}) for problem in problems]
    in_file = [problem.given is None and _has(config or {}, problem.name) for problem in problems]
    found = [f"the config and {one}" if one and both else one for one, both in zip(typed, in_file, strict=True)]
    lines = [_line(problem, origin) for problem, origin in zip(problems, found, strict=True)]
    where = None if all(typed) and not any(in_file) else where
    if len(problems) == 1:
        return OptionError(lines[0], where=where, remedy=problems[0].remedy)
    each = [f"{line} ({p.remedy})" if p.remedy else line for p, line in zip(problems, lines, strict=True)]
    what = "\n    ".join((f"{len(problems)} options are wrong:", *each))
    return OptionError(what, where=where, remedy="correct each of them; --set NAME=VALUE overrides what a config says")


def _origin(name: str, origins: Mapping[str, str]) -> str | None:
    """What `name`, a table that it is in, or, if it is a table, the first option in it was typed as."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    inside = [option for option in origins if option.startswith(f"{name}.")]
    return next((origins[option] for option in (*prefixes, *inside) if option in origins), None)


def _has(config: Mapping[str, object], name: str) -> bool:
    """Whether there is something at the dotted `name`."""
    inner: object = config
    for part in name.split("."):
        if not isinstance(inner, dict) or part not in inner:
            return False
        inner = inner[part]
    return True


def _line(problem: Problem, origin: str | None) -> str:
    given = f" = {problem.given}" if problem.given is not None else ""
    typed = f" (from {origin})" if origin else ""
    name = problem.name.removeprefix("overrides.")  # a run's changes are in the layout of the config
    return f"{name}{given}{typed}: {problem.what}" if name else problem.what
