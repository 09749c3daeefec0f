"""Which steps are meant, as people type it: `17`, `100-120`, `100-` or `-20`."""

import re
from dataclasses import dataclass

from sambasim.options.problems import Problem, Refused, show

_RANGE = re.compile(r"(?P<first>[0-9]{0,18})(?P<dash>-?)(?P<last>[0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps `first` to `last`, which count from 1; without a `last`, all from `first` on."""

    first: int = 1
    last: int | None = None

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)


def step_range(text: str | None) -> StepRange:
    """The steps that `text` means; all of them for None. Raises Refused for what means none."""
    if text is None:
        return StepRange()
    match = _RANGE.fullmatch(text.strip())
    if match is None or not (match["first"] or match["last"]):
        raise Refused(Problem("", "must be a step, or a range of them", "17, 100-120 or 100-", show(text)))
    first = int(match["first"] or 1)
    last = int(match["last"]) if match["last"] else None if match["dash"] else first
    if first < 1 or (last is not None and last < first):
        what = "steps count from 1" if first < 1 else "ends before it begins"
        raise Refused(Problem("", what, "17, 100-120 or 100-", show(text)))
    return StepRange(first, last)
