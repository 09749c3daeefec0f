"""What a stranger's PEF made Python or torch say in a run: reading and rehearsal have let it through.

`blaming` tells it as the file's fault, so nobody comes to harm; but each is something that a rule could have refused
before any work. They are counted by the place that they came from, and are no findings.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from unittest.mock import patch

import sambasim
from sambasim.cli.failure import explain

_ROOM = Path(sambasim.__file__).resolve().parent
_BLAMING = ("blaming", "_blaming")
"""What raises them, in `runtime.admission` and in `cli.prediction`."""
_OPERATOR = re.compile(r"the operator (\S+) failed")
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Blamed:
    """`place` is the innermost line of sambasim, with the type of what came out of it, and the operator if one failed;
    `why` are its first words."""

    place: str
    why: str


def blamed(error: BaseException) -> Blamed | None:
    """What is behind `error`, if a run's own exception was turned into it."""
    cause, frames = error.__cause__, [*walk_tb(error.__traceback__)]
    if cause is None or not frames or frames[-1][0].f_code.co_name not in _BLAMING:
        return None
    ours = [
        (Path(frame.f_code.co_filename).resolve(), line, frame.f_code.co_name)
        for frame, line in walk_tb(cause.__traceback__)
        if Path(frame.f_code.co_filename).resolve().is_relative_to(_ROOM)
    ]
    file, line, function = ours[-1]
    why = (str(cause).strip().splitlines() or [""])[0][:_SHOWN]
    operator = f" of {match[1]}" if (match := _OPERATOR.match(why)) else ""
    return Blamed(f"{file.relative_to(_ROOM.parent)}:{line} {function}: {type(cause).__name__}{operator}", why)


@contextmanager
def overhearing() -> Iterator[list[Blamed]]:
    """Gives a list that fills with what commands tell of this kind."""
    heard: list[Blamed] = []

    def listen(error: BaseException) -> None:
        if (found := blamed(error)) is not None:
            heard.append(found)
        explain(error)

    with patch("sambasim.cli.main.explain", listen):
        yield heard
