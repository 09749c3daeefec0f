"""Commands as typed, in this process."""

import json
from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result

from sambasim.cli.main import sambasim
from sambasim.errors import SambasimError


def invoked(*words: str) -> Result:
    return CliRunner().invoke(sambasim, words)


def printed(*words: object) -> str:
    return CliRunner().invoke(sambasim, [*map(str, words)], catch_exceptions=False).stdout


def record(*words: object) -> Any:
    """The one line of JSON that a command prints."""
    (line,) = printed(*words, "--json").splitlines()
    return json.loads(line)


def refused(*words: str, kind: type[SambasimError] = SambasimError) -> SambasimError:
    error = invoked(*words).exception
    assert isinstance(error, kind), error
    return error


def each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
