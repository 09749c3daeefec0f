"""Read tables of figures, ours and the user's, each figure beside its source."""

import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sambasim.bounded import LARGEST_TOML_BYTES, nests_too_deeply, read_text, shortened
from sambasim.errors import OptionError

Table = TypeVar("Table", bound=BaseModel)


def shipped(folder: str) -> tuple[str, ...]:
    """The names of the tables in `folder` of this room, in order."""
    entries = (files("sambasim.hardware") / folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


def shipped_text(name: str) -> str:
    """The text of one file of this room."""
    return (files("sambasim.hardware") / name).read_text(encoding="utf-8")


def is_file(name: str) -> bool:
    """Whether `name` is meant as a file, and not as the name of a table that ships with sambasim."""
    return name.endswith(".toml") or "/" in name


def user_text(flag: str, name: str) -> str:
    """The text of a file that the user names. Raises OptionError if it cannot be read."""
    try:
        return read_text(Path(name), LARGEST_TOML_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"{flag} {name} cannot be read: {reason}", remedy="name a TOML file") from error


def checked(
    model: type[Table],
    text: str,
    where: str,
    prepare: Callable[[dict[str, object]], dict[str, object]] = lambda table: table,
) -> Table:
    """`text` as a `model`, its table `prepare`d. Raises OptionError that names each figure that is missing, unknown or
    out of range."""
    try:
        tables = tomllib.loads(text)
        if nests_too_deeply(tables):
            raise RecursionError
        return model.model_validate(prepare(tables))
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{where} is no TOML: {shortened(str(error))}", remedy="correct it there") from error
    except RecursionError:
        raise OptionError(f"{where} is nested too deeply", remedy="correct it there") from None
    except ValidationError as error:
        wrong = "; ".join(_problem(detail["loc"], detail["msg"], detail["type"]) for detail in error.errors())
        raise OptionError(f"{where} is no {model.__name__}: {wrong}", remedy="correct it there") from error


def _problem(place: tuple[int | str, ...], message: str, kind: str) -> str:
    name = ".".join(map(str, place))
    if kind == "missing":
        return f"{name} is missing"
    if kind == "extra_forbidden":
        return f"{name} is unknown"
    message = message.removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
