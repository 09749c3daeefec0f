"""SambaFlow-style names: `logreg__lin_layer__weight`, `logreg__lin_layer__weight__grad`.

The prefix is the lower-cased name of the model's class; the module path follows, its dots written as `__`.
"""

import re

_NOT_WORD = re.compile(r"\W")


def symbol_name(prefix: str, path: str) -> str:
    """`("logreg", "lin_layer.weight")` -> `"logreg__lin_layer__weight"`."""
    return "__".join((prefix, *(_NOT_WORD.sub("_", part) for part in path.split(".") if part)))


def gradient_name(parameter: str) -> str:
    """The symbol of a parameter's gradient."""
    return f"{parameter}__grad"


def prefix_of(name: str) -> str:
    """The model's prefix of a name: `"logreg__lin_layer__addmm"` -> `"logreg"`."""
    return name.partition("__")[0]


class UniqueNames:
    """Hands out names, each once: the second `x` is `x_1`."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, name: str) -> str:
        """`name`, or `name` with the first free number behind it."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if count == 0:
            return name
        return self.take(f"{name}_{count}")
