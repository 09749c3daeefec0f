"""How the losses of two runs part, in a few rows."""

from collections.abc import Sequence

from sambasim.report.compare.result import LossApart

Losses = Sequence[tuple[int, float | None, float | None]]
"""By step: the loss of A and of B."""


def relative_difference(a: float | None, b: float | None) -> float | None:
    """Of two numbers, by the larger of them; None where one is not finite or not known."""
    if a is None or b is None:
        return None
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def losses_apart(losses: Losses) -> tuple[LossApart, ...]:
    """The first step whose losses differ, then steps at distances that double, and the last; none if all are alike."""
    first = next((index for index, (_, a, b) in enumerate(losses) if a != b), None)
    if first is None:
        return ()
    chosen, distance = [first], 1
    while first + distance < len(losses) - 1:
        chosen.append(first + distance)
        distance *= 2
    if len(losses) - 1 > first:
        chosen.append(len(losses) - 1)
    rows = [losses[index] for index in chosen]
    return tuple(LossApart(step=step, a=a, b=b, relative=relative_difference(a, b)) for step, a, b in rows)
