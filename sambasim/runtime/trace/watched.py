"""What a trace shows of an object: some of its methods, each call a span.

Whoever runs a step names the methods that are worth seeing, and otherwise knows nothing of traces. For the steps that
are traced, a stopwatch stands in for each, in the one object and not in its class; then it is taken away again. So a
step that is not traced runs the code that it always ran.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sambasim.records.trace import Track

Args = Mapping[str, int | float | str]
Tell = Callable[..., Args]


def _nothing(result: object, *args: object, **by_name: object) -> Args:
    return {}


class Watched(NamedTuple):
    """The method `method` of `owner`, or a function that it keeps by that name. A call of it is a span called `name`.

    tell: what there is to say of a call, given its result and its arguments
    """

    owner: object
    method: str
    track: Track
    name: str
    tell: Tell = _nothing


class StandIns:
    """What stands in for methods of objects for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, bool, object]] = []

    def put(self, owner: object, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """What `make` makes of the method stands in for it. Raises AttributeError if `owner` has none of that name."""
        now = getattr(owner, method)
        self._before.append((owner, method, method in vars(owner), now))
        setattr(owner, method, make(now))

    def remove(self) -> None:
        """Everything is as it was."""
        while self._before:
            owner, method, kept, before = self._before.pop()
            if kept:
                setattr(owner, method, before)
            else:
                delattr(owner, method)
