"""Names of symbols and layers, for files that must not wait for PyTorch's tracer."""

import re

_WEIGHT_NORM = re.compile(r"(^|\.)parametrizations\.weight\.original([01])$")


def symbol_name(prefix: str, path: str) -> str:
    """`("logreg", "lin_layer.weight")` -> `"logreg__lin_layer__weight"`; under weight_norm `…weight_magnitude` and
    `…weight_direction`, as in SambaFlow."""
    path = _WEIGHT_NORM.sub(lambda found: f"{found[1]}weight_{('magnitude', 'direction')[int(found[2])]}", path)
    return "__".join((prefix, *(re.sub(r"\W", "_", part) for part in path.split(".") if part)))


def loss_name(prefix: str) -> str:
    """The symbol of the training step's loss, unless something else has that name."""
    return f"{prefix}__loss"


def prefix_of(loss: str) -> str:
    """The model's prefix, from the symbol of its loss: `"logreg__loss"` or `"logreg__loss_1"` -> `"logreg"`."""
    return loss.rpartition("__loss")[0]


class UniqueNames:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, name: str, *suffixes: str) -> str:
        """`name`, or `name` with the first free number behind it. Takes that name with each of `suffixes` too."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if count == 0 and not any(f"{name}{suffix}" in self._counts for suffix in suffixes):
            self._counts |= {f"{name}{suffix}": 1 for suffix in suffixes}
            return name
        return self.take(f"{name}_{max(count, 1)}", *suffixes)
