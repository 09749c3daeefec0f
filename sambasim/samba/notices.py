"""What is said, once, when an app uses a name that changes nothing here although it may expect an effect."""

import os
import sys

from sambasim.runtime.launcher import launched_rank

_SAID: set[str] = set()


def say_once(name: str, why: str, where: str | None = None) -> None:
    """A line on stderr the first time in this process that `name` comes, on rank 0 alone; and one with the app's line,
    `where`, if that is given."""
    if name not in _SAID:
        _SAID.add(name)
        if launched_rank(os.environ) == 0:
            place = f"  where: {where}\n" if where else ""
            sys.stderr.write(f"notice: {name} has no effect: {why}\n{place}")
