"""SambaFlow-style names: `logreg__lin_layer__weight`, `logreg__lin_layer__weight__grad`.

The prefix is the lower-cased name of the model's class; the module path follows, its dots written as `__`.
"""

import re

_NOT_WORD = re.compile(r"\W")
_WEIGHT_NORM = re.compile(r"(^|\.)parametrizations\.weight\.original([01])$")
"""What torch's weight_norm makes of a weight: its length and its direction."""


def symbol_name(prefix: str, path: str) -> str:
    """`("logreg", "lin_layer.weight")` -> `"logreg__lin_layer__weight"`.

    The parts of a weight under torch's weight_norm have SambaFlow's names, `lin_layer.weight_magnitude` and
    `lin_layer.weight_direction`.
    """
    path = _WEIGHT_NORM.sub(lambda found: f"{found[1]}weight_{('magnitude', 'direction')[int(found[2])]}", path)
    return "__".join((prefix, *(_NOT_WORD.sub("_", part) for part in path.split(".") if part)))


GRADIENT_SUFFIX = "__grad"


def gradient_name(parameter: str) -> str:
    """The symbol of a parameter's gradient. No other symbol has that name: parameters are named so that it is free."""
    return f"{parameter}{GRADIENT_SUFFIX}"


def parameter_of(gradient: str) -> str:
    """The parameter whose `gradient_name` this is."""
    return gradient.removesuffix(GRADIENT_SUFFIX)


def loss_name(prefix: str) -> str:
    """The symbol of the training step's loss, unless something else has that name."""
    return f"{prefix}__loss"


def prefix_of(loss: str) -> str:
    """The model's prefix, from the symbol of its loss: `"logreg__loss"` or `"logreg__loss_1"` -> `"logreg"`."""
    return loss.rpartition("__loss")[0]


class UniqueNames:
    """Hands out names, each once: the second `x` is `x_1`."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, name: str, *suffixes: str) -> str:
        """`name`, or `name` with the first free number behind it. With each of `suffixes` behind it, the name that is
        handed out was free too, and is taken along."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if count == 0 and not any(f"{name}{suffix}" in self._counts for suffix in suffixes):
            self._counts |= {f"{name}{suffix}": 1 for suffix in suffixes}
            return name
        return self.take(f"{name}_{max(count, 1)}", *suffixes)
