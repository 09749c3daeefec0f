"""Where the losses of two runs part, as `run --metrics` wrote them: by step, without digests of what came before."""

import math
from collections.abc import Callable, Iterator, Mapping

from sambasim.records.metrics import RunRecords, SummaryRecord
from sambasim.report.compare.facts import facts, not_comparable_by_summary, told
from sambasim.report.compare.losses import losses_apart, relative_difference
from sambasim.report.compare.result import MetricsCompared

_OF_A_STEP = ("loss", "lr", "grad_norm")
_OF_AN_EVALUATION = ("loss", "accuracy", "samples")
_DIGESTS = ("weights_sha256", "state_sha256")


def compare_metrics(
    a: tuple[str, RunRecords], b: tuple[str, RunRecords], wanted: Callable[[int], bool] = lambda step: True
) -> MetricsCompared:
    """Two runs, each with its path. Compares the steps that are `wanted`."""
    ours, theirs = ({one.step: one for one in records.steps if wanted(one.step)} for _, records in (a, b))
    common = [step for step in ours if step in theirs]
    apart = (
        (step, name)
        for step in common
        for name in _OF_A_STEP
        if _differ(getattr(ours[step], name), getattr(theirs[step], name))
    )
    first = next((_told(step, name, ours[step], theirs[step]) for step, name in apart), None)
    one, other = a[1].summary, b[1].summary
    right = () if one is None or other is None else not_comparable_by_summary(one, other)
    results = facts(*_results(a[1], b[1]))
    notes = tuple(_notes(list(ours), list(theirs), (one, other)))
    differ = first or next((f"{one.name}: {one.a} and {one.b}" for one in results), None)
    return MetricsCompared(
        a=a[0],
        b=b[0],
        alike=differ is None and ours.keys() == theirs.keys() and bool(ours),
        verdict=_verdict(differ, told(right), len(common), whole=ours.keys() == theirs.keys()),
        not_comparable=right,
        steps=len(common),
        first=first,
        losses=losses_apart([(step, _number(ours[step].loss), _number(theirs[step].loss)) for step in common]),
        results=results,
        notes=notes,
    )


def _verdict(differ: str | None, right: str, steps: int, *, whole: bool) -> str:
    if differ is not None:
        return (f"not comparable bit by bit: {right}; " if right else "") + f"they part at {differ}"
    if not steps:
        return "nothing to compare: they have no step in common"
    counts = f"{steps:,} step{'' if steps == 1 else 's'}"
    return (
        f"alike: losses of {counts}" + ("" if whole else ", as far as both go") + (f", though {right}" if right else "")
    )


def _told(step: int, name: str, a: object, b: object) -> str:
    one, other = getattr(a, name), getattr(b, name)
    relative = relative_difference(_number(one), _number(other))
    much = "" if relative is None else f", {relative:.1e} apart"
    return f"step {step}: {name} {one!r} and {other!r}{much}"


def _results(a: RunRecords, b: RunRecords) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """What came of both runs: evaluations after the same steps, and digests after as many."""
    ours, theirs = _evaluations(a), _evaluations(b)
    common = [name for name in ours if name in theirs]
    found = {name: ours[name] for name in common}, {name: theirs[name] for name in common}
    if a.summary is not None and b.summary is not None and a.summary.steps == b.summary.steps:
        for results, summary in zip(found, (a.summary, b.summary), strict=True):
            results.update({name: getattr(summary, name) for name in _DIGESTS})
    return found


def _evaluations(records: RunRecords) -> dict[str, object]:
    return {
        f"evaluation after step {one.step}, {name}": getattr(one, name)
        for one in records.evaluations
        for name in _OF_AN_EVALUATION
    }


def _notes(a: list[int], b: list[int], summaries: tuple[SummaryRecord | None, SummaryRecord | None]) -> Iterator[str]:
    for name, steps, others, summary in (("A", a, b, summaries[0]), ("B", b, a, summaries[1])):
        if steps and others and steps[-1] != others[-1]:
            yield f"{name} ends after step {steps[-1]}"
        if summary is None:
            yield f"{name} has no summary: that run failed, or goes on; its threads and engine are not known"
    yield "times are not compared; `run --record-digests` tells in which tensor two runs part"


def _differ(a: float | None, b: float | None) -> bool:
    return repr(a) != repr(b)  # so that one NaN is like another, and -0.0 not like 0.0


def _number(value: float | None) -> float | None:
    """None for what is not finite."""
    return value if value is not None and math.isfinite(value) else None
