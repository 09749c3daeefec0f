"""Reading a YAML file of flags and values."""

import os
from pathlib import Path

import yaml

from sambasim.errors import OptionError


def read_yaml(path: str | os.PathLike[str]) -> dict[str, object]:
    """The names and values of a YAML file. It may hold plain data only: a tag that would make an object is refused.

    Raises OptionError, with the line, if it cannot be read, is not YAML, or is not names with values.
    """
    file = Path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"the file {file} cannot be read: {reason}", remedy="check the path") from None
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        what = getattr(error, "problem", None) or "it holds a character that is not allowed"
        where = str(file) if mark is None else f"{file}:{mark.line + 1}"
        raise OptionError(f"this is not plain YAML: {what}", where=where, remedy="correct that line") from None
    return {} if content is None else named_values(content, str(file))


def named_values(content: object, where: str) -> dict[str, object]:
    """`content`, if it is names with values. YAML reads the names `no:` and `1:` as other than text.

    where: the file, and the place in it, for the message

    Raises OptionError if it is anything else.
    """
    if not isinstance(content, dict):
        what = f"this YAML has {content!r} where names with values belong"
        raise OptionError(what, where=where, remedy="one `name: value` in each line")
    strange = [name for name in content if not isinstance(name, str)]
    if strange:
        what = f"YAML reads a name here as {strange[0]!r}, which is no text"
        raise OptionError(what, where=where, remedy="put quotation marks around the name")
    return content
