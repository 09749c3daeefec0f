"""Options from TOML files, `--set` and flags; one error for all mistakes; whether outputs can be written."""

import copy
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sambasim.bounded import LARGEST_TOML_BYTES, nests_too_deeply, read_text, shortened
from sambasim.errors import OptionError
from sambasim.options.flags import Setting
from sambasim.options.grammar import absolute_source, absolute_target
from sambasim.options.problems import Problem, explain, show

M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path) -> dict[str, object]:
    """The tables of a TOML file. Raises OptionError, with the line, if it is not TOML or cannot be read."""
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

    The value is TOML; a word that is not TOML is text, so quotes can be left out. An empty value removes the name, so
    that its default applies. Raises OptionError if there is no `=`, for an invalid name, and for a name inside of
    something that is not a table.
    """
    result = copy.deepcopy(dict(mapping))
    for override in overrides:
        _, equals, text = override.partition("=")
        if not equals:
            raise OptionError(f"--set {override} has no value", remedy=f"--set {override}=VALUE")
        value = _value(text.strip(), override) if text.strip() else None
        _assign(result, override_name(override), value, f"--set {override}")
    return result


def with_value(mapping: Mapping[str, object], name: str, value: object, typed: str) -> dict[str, object]:
    """A copy of `mapping` with `value` at the dotted `name`; `typed` says in errors where it comes from."""
    result = copy.deepcopy(dict(mapping))
    _assign(result, name.split("."), value, typed)
    return result


def apply_flags(
    mapping: Mapping[str, object], given: Mapping[str, object], known: Mapping[str, Setting]
) -> tuple[dict[str, object], dict[str, str]]:
    """A copy of `mapping` with each flag that was given set in it, and the origins of these for `build`.

    given: values by keyword; None is a flag that was not given
    known: the flags of the command. Raises OptionError for any other keyword.
    """
    result, origins = copy.deepcopy(dict(mapping)), dict[str, str]()
    for keyword, value in given.items():
        if keyword not in known:
            raise refusal([Problem(keyword, f"is not a flag; they are {', '.join(known)}")])
        setting = known[keyword]
        if value is not None:
            _assign(result, setting.name.split("."), value, setting.flag.typed)
            origins[setting.name] = setting.flag.typed
    return result, origins


def absolute_names(mapping: Mapping[str, object], folder: Path) -> dict[str, object]:
    """A copy of `mapping` with the files of model, data and loss relative to `folder` made absolute."""
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
    """Set the value at `path`, or remove it if it is None. Missing tables are made."""
    *tables, last = path
    table = mapping
    for depth, part in enumerate(tables):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            name = ".".join(tables[: depth + 1])
            raise OptionError(f"{typed} cannot be set: {name} is {show(inner)}, and not a table")
        table = inner
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def override_name(override: str) -> list[str]:
    """`"model.args.depth=3"` -> `["model", "args", "depth"]`. Raises OptionError for an invalid name."""
    name = override.partition("=")[0]
    try:
        inner: object = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        raise OptionError(
            f"--set {override} does not start with a valid name", remedy="--set optimizer.lr=1e-3"
        ) from None
    parts: list[str] = []
    while isinstance(inner, dict) and len(inner) == 1:
        [(part, inner)] = inner.items()
        parts.append(part)
    if not parts or inner != 0:
        raise OptionError(f"--set {override} does not start with a valid name", remedy="--set optimizer.lr=1e-3")
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
            remedy="close all brackets and quotes, and put single quotes around the whole for the shell",
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

    origins: where a value comes from, by dotted name: `--batch-size`
    config: what the file `where` holds

    Raises one OptionError for all problems. Each has the dotted name, what was given, what is allowed, and for an
    unknown name the most similar one.
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
    """One error for all problems. It names the file `where`, unless all of them come from the command line only: an
    unknown name can be in the `config` too."""
    typed = [_origin(problem.name, origins or {}) for problem in problems]
    in_file = [problem.given is None and _has(config or {}, problem.name) for problem in problems]
    found = [f"the config and {one}" if one and both else one for one, both in zip(typed, in_file, strict=True)]
    lines = [_line(problem, origin) for problem, origin in zip(problems, found, strict=True)]
    where = None if all(typed) and not any(in_file) else where
    if len(problems) == 1:
        return OptionError(lines[0], where=where, remedy=problems[0].remedy)
    each = [f"{line} ({p.remedy})" if p.remedy else line for p, line in zip(problems, lines, strict=True)]
    what = "\n    ".join((f"{len(problems)} options are wrong:", *each))
    return OptionError(what, where=where, remedy="correct each of them; --set NAME=VALUE overrides the config")


def _origin(name: str, origins: Mapping[str, str]) -> str | None:
    """Where `name` comes from, or a table that it is in, or, if it is a table, the first option in it."""
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
    name = problem.name.removeprefix("overrides.")  # the overrides of a run have the names of a config
    return f"{name}{given}{typed}: {problem.what}" if name else problem.what


def check_output_file(path: Path, what: str, remedy: str) -> None:
    """Raises OptionError if the file `path` cannot be written, before the work that it would be lost with.

    what: the file in a sentence, "the metrics file"
    remedy: what to type instead

    Missing folders are no error: they are made when the file is. Nothing is left behind.
    """
    if path.is_dir():
        raise _not_writable(path, what, f"{path} is a folder", remedy)
    if path.exists() and not os.access(path, os.W_OK):
        raise _not_writable(path, what, f"{path} is not writable", remedy)
    if path.exists() and not path.is_file():
        return  # a device or a pipe, such as /dev/stdout, is written in place
    _check_folder(path.parent, path, what, remedy)


def check_output_folder(path: Path, what: str, remedy: str) -> None:
    """As `check_output_file`, for a folder of files."""
    _check_folder(path, path, what, remedy)


def _check_folder(folder: Path, path: Path, what: str, remedy: str) -> None:
    absolute = Path(os.path.abspath(folder))
    folder = next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
    if not folder.is_dir():
        raise _not_writable(path, what, f"{folder} is not a folder", remedy)
    try:
        # os.access says yes on a read-only disk and in /proc, so a file is made.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _not_writable(path, what, f"no file can be made in {folder}: {error.strerror}", remedy) from None


def _not_writable(path: Path, what: str, why: str, remedy: str) -> OptionError:
    return OptionError(f"{what} cannot be written to {path}", where=why, remedy=remedy)
