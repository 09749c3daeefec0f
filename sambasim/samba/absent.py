"""What is said of a name that a module of this room does not have."""

import difflib
from collections.abc import Iterable


def no_such_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error to raise for `module.name`: it gives the names in `known` that are near, or, if none is and they are
    few, all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=4, cutoff=0.6) or (choices if len(choices) <= 12 else [])
    hint = f"; near it there is {', '.join(near)}" if near else ""
    return AttributeError(f"{module} has no {name}{hint}")
