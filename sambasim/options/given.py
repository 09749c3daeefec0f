"""Options as they are given: in TOML files, by `--set`, by flags, and in Python."""

import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sambasim.errors import LARGEST_TOML_BYTES, OptionError, failing_with, is_too_deep
from sambasim.files import read_text
from sambasim.options.flag import Setting
from sambasim.options.problem import Given, Problem, near_file, refusal, show, suggested


def config_text(path: Path, kind: str, if_missing: str, if_no_text: str) -> str:
    """The text of a file of options. Raises OptionError with one of two remedies if it cannot be read."""
    with failing_with(OptionError, f"the {kind} {path} cannot be read", if_no_text):
        try:
            text = read_text(path, LARGEST_TOML_BYTES)
        except FileNotFoundError:
            remedy = near_file(path, ".toml") or if_missing
            raise OptionError(f"there is no {kind} {path}", remedy=remedy) from None
    return text


def read_toml(path: Path) -> dict[str, object]:
    """The tables of a TOML file. Raises OptionError, with the line, if it is not TOML or cannot be read."""
    text = config_text(path, "config file", f"check the path: {path.absolute()}", "--config FILE.toml")
    try:
        tables = tomllib.loads(text)
        if is_too_deep(tables):
            raise RecursionError
        return tables
    except RecursionError:
        raise OptionError(f"the config {path} is nested too deeply", remedy="correct it there") from None
    except ValueError as error:  # also an integer of thousands of digits
        reason, _, position = str(error).partition(" (at ")
        lines, at = text.splitlines(), re.match(r"line (\d+)", position)
        number = int(at.group(1)) if at else max(len(lines), 1)
        code = lines[number - 1].strip() if number <= len(lines) else ""
        what = f"the config is not valid TOML: {reason[:1].lower() + reason[1:]}"
        raise OptionError(what, where=f"{path}:{number}: {code}", remedy="correct that line") from None


def given_overrides(overrides: Sequence[str]) -> list[Given]:
    """Each `NAME=VALUE` of `--set`. The value is TOML; a word that is not TOML is text; an empty value removes the
    name. Raises OptionError for an invalid name or value."""
    if missing := [override for override in overrides if "=" not in override]:
        raise OptionError(f"--set {missing[0]} has no value", remedy=f"--set {missing[0]}=VALUE")
    return [Given(_path(override), _value(override), "--set") for override in overrides]


def given_settings(settings: object) -> list[Given]:
    """What `set=` gives in Python, `{"data.shuffle": False}`; None removes a name. Raises OptionError."""
    if not isinstance(settings, Mapping):
        raise OptionError(f"set is {show(settings)}, not a dictionary", remedy='set={"data.shuffle": False}')
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return [Given(_path(str(name)), value, "set") for name, value in plain.items()]


def given_flags(flags: Mapping[str, object], known: Mapping[str, Setting], options: Iterable[str] = ()) -> list[Given]:
    """Each flag given, by keyword; None is not given. Raises OptionError for others, with the one of `options`."""
    for keyword in flags:
        if keyword not in known:
            names = {name: f"--set {name}=…" for name in options}
            names |= {one.name.removeprefix("overrides."): f"did you mean {word}?" for word, one in known.items()}
            same = (names[name] for name in names if keyword in (name.replace(".", "_"), name.rpartition(".")[2]))
            guess = next(same, suggested(keyword, known))
            what = "is not a flag" if guess else f"is not a flag; they are {', '.join(known)}"
            raise refusal([Problem(keyword, what, guess)])
    settings = ((known[keyword], value) for keyword, value in flags.items() if value is not None)
    return [Given(setting.name.split("."), value, setting.flag.typed) for setting, value in settings]


def assign(mapping: Mapping[str, object], given: Iterable[Given]) -> dict[str, object]:
    """A copy of `mapping` with `given` in it. Raises OptionError for a name inside of something that is no table."""
    result = copy.deepcopy(dict(mapping))
    for path, value, origin in given:
        *tables, last = path
        table = result
        for depth, part in enumerate(tables, 1):
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                outer = f"{'.'.join(tables[:depth])} is {show(inner)}, and not a table"
                raise OptionError(f"{'.'.join(path)} (from {origin}) cannot be set: {outer}")
            table = inner
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return result


def _path(override: str) -> list[str]:
    """`"model.args.depth=3"` -> `["model", "args", "depth"]`."""
    parts: list[str] = []
    inner: object = None
    with suppress(tomllib.TOMLDecodeError):
        inner = tomllib.loads(f"{override.partition('=')[0]} = 0")
    while isinstance(inner, dict) and len(inner) == 1:
        [(part, inner)] = inner.items()
        parts.append(part)
    if not parts or inner != 0:
        raise OptionError(f"--set {override} does not start with a valid name", remedy="--set optimizer.lr=1e-3")
    return parts


def _value(override: str) -> object:
    text = override.partition("=")[2].strip()
    if not text:
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError as error:  # also an integer of thousands of digits
        if text[0] not in "\"'[{":
            return text  # a bare word
        reason = str(error).partition(" (at ")[0]
        remedy = "close all brackets and quotes, and put single quotes around the whole for the shell"
        what = f"--set {override} has a value that is not TOML: {reason[:1].lower()}{reason[1:]}"
        raise OptionError(what, remedy=remedy) from None
    return parsed["value"] if len(parsed) == 1 else text


def as_table(value: object) -> Mapping[str, object]:
    """`value`, if it is a table, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def leaf_paths(table: Mapping[str, object], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """The values in nested tables, with their names."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaf_paths(value, (*above, name))
        else:
            yield (*above, name), value


def leaves(table: Mapping[str, object]) -> dict[str, object]:
    """The values in nested tables, by dotted name."""
    return {".".join(path): value for path, value in leaf_paths(table)}


def changed_values(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """The values that differ, as text, before and now, by dotted name."""
    old, new = leaves(before), leaves(now)

    def shown(value: object) -> str:
        return "none" if value is None else show(value)

    names = (name for name in old | new if old.get(name) != new.get(name))
    return {name: (shown(old.get(name)), shown(new.get(name))) for name in names}
