"""Compares two runs: recordings of digests, and metrics files. Tensors are matched by name, in the order in which the
first run computed them; at equal positions the lowest replica comes first."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from typing import NamedTuple

from sambasim.records.digests import Recording, StepDigests, ValueDigest
from sambasim.records.metrics import RunRecords, SummaryRecord
from sambasim.report import compare
from sambasim.report.compare import DigestDifference, MetricsCompared, RunsCompared, relative_difference
from sambasim.units import counted

_MOST_SHOWN = 6


class _Line(NamedTuple):
    step: int
    replica: int
    side: int
    digests: StepDigests


@dataclass(slots=True)
class _Progress:
    titles: dict[int, str]
    digests: int = 0
    steps: set[int] = field(default_factory=set)
    differences: list[DigestDifference] = field(default_factory=list)
    equal_before: int = 0
    last_equal: tuple[int, int, ValueDigest, bool] | None = None
    by_step: dict[int, int] = field(default_factory=dict)
    losses: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    only_in_a: int = 0
    only_in_b: int = 0
    starts: list[int | None] = field(default_factory=lambda: [None, None])
    ends: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))


def compare_runs(a: Recording, b: Recording, wanted: Callable[[int], bool] = lambda step: True) -> RunsCompared:
    """Compare the steps of two recordings for which `wanted` is true. Raises what `Recording.steps` raises."""
    found = _Progress({one.number: f"{one.number} {one.kind} {one.name}" for one in a.run.sections})
    replicas = tuple(sorted({*a.replicas} & {*b.replicas}))
    recorded = [
        _lines(recording, replica, side, wanted) for replica in replicas for side, recording in enumerate((a, b))
    ]
    for step, lines in groupby(merge(*recorded, key=lambda line: line[:3]), key=lambda line: line.step):
        _compare_step(step, lines, found)
    return _runs_result(a, b, replicas, found)


def _lines(recording: Recording, replica: int, side: int, wanted: Callable[[int], bool]) -> Iterator[_Line]:
    for line in recording.steps(replica):
        if wanted(line.step) or (line.begins and wanted(line.step + 1)):
            yield _Line(line.step, replica, side, line)


def _compare_step(step: int, lines: Iterable[_Line], found: _Progress) -> None:
    seen: list[tuple[int, int, ValueDigest, ValueDigest]] = []
    begins = False
    for replica, of_replica in groupby(lines, key=lambda line: line.replica):
        sides = {line.side: line.digests for line in of_replica}
        for side, line in sides.items():
            found.ends[side][replica] = step
            if found.starts[side] is None and not line.begins:
                found.starts[side] = step
        if len(sides) == 1:
            continue
        a, b = sides[0], sides[1]
        begins = a.begins or b.begins
        if not begins:
            found.steps.add(step)
            found.losses.setdefault(step, (a.loss, b.loss))
        ours, theirs = _by_name(a), _by_name(b)
        if a.begins == b.begins:  # otherwise one is a whole step, and the other only the state after it
            found.only_in_a += len(ours.keys() - theirs.keys())
            found.only_in_b += len(theirs.keys() - ours.keys())
        seen += [(position, replica, ours[key], theirs[key]) for position, key in enumerate(ours) if key in theirs]
    for _, replica, one, other in sorted(seen, key=lambda row: row[:2]):
        found.digests += 1
        if one.digest != other.digest:
            found.by_step[step] = found.by_step.get(step, 0) + 1
            _add_difference(found, step, replica, one, other, begins=begins)
        elif not found.differences:
            found.equal_before += 1
            found.last_equal = (step, replica, one, begins)


def _add_difference(
    found: _Progress, step: int, replica: int, one: ValueDigest, other: ValueDigest, *, begins: bool
) -> None:
    """Add a tensor that differs, or add the replica to the last one if it is the same tensor."""
    last = found.differences[-1] if found.differences else None
    if last is not None and (last.step, last.what, last.name, last.micro_step) == (step, *one[:3]):
        found.differences[-1] = last.model_copy(update={"replicas": (*last.replicas, replica)})
    elif len(found.differences) < _MOST_SHOWN:
        found.differences.append(_apart(step, replica, one, other, found.titles, begins=begins))


def _by_name(line: StepDigests) -> dict[tuple[str, str, int | None], ValueDigest]:
    """In the order of computation. The section is not part of the key: another program may have other sections."""
    return {(one.what, one.name, one.micro_step): one for one in line.values}


def _apart(
    step: int, replica: int, one: ValueDigest, other: ValueDigest, titles: dict[int, str], *, begins: bool
) -> DigestDifference:
    return DigestDifference(
        step=step,
        replicas=(replica,),
        micro_step=one.micro_step,
        section=one.section,
        section_title=None if one.section is None else titles.get(one.section, str(one.section)),
        what=one.what,
        name=one.name,
        norm_a=one.norm,
        norm_b=other.norm,
        relative_norm_difference=relative_difference(one.norm, other.norm),
        not_finite_a=one.not_finite,
        not_finite_b=other.not_finite,
        begins=begins,
    )


def _runs_result(a: Recording, b: Recording, replicas: tuple[int, ...], found: _Progress) -> RunsCompared:
    facts = compare.differing_facts(compare.deciding_facts(a.run), compare.deciding_facts(b.run))
    whole = a.replicas == b.replicas and found.ends[0] == found.ends[1] and not (found.only_in_a or found.only_in_b)
    first = found.differences[0] if found.differences else None
    return RunsCompared(
        a=str(a.folder),
        b=str(b.folder),
        equal=first is None and whole and found.digests > 0,
        verdict=_runs_verdict(first, compare.facts_text(facts), whole, len(replicas), found),
        not_comparable=facts,
        other_options=compare.differing_options(a.run, b.run),
        steps=len(found.steps),
        replicas=replicas,
        digests=found.digests,
        first=first,
        equal_before=found.equal_before,
        last_equal=_last_equal(found),
        next_differences=tuple(found.differences[1:]),
        differing_by_step=dict(list(found.by_step.items())[:_MOST_SHOWN]),
        losses=compare.differing_losses([(step, *both) for step, both in found.losses.items()]),
        only_in_a=found.only_in_a,
        only_in_b=found.only_in_b,
        notes=tuple(_runs_notes(a, b, found)),
    )


def _last_equal(found: _Progress) -> str | None:
    if found.last_equal is None or not found.differences:
        return None
    step, replica, one, begins = found.last_equal
    return compare.place(_apart(step, replica, one, one, found.titles, begins=begins))


def _runs_verdict(first: DigestDifference | None, facts: str, whole: bool, replicas: int, found: _Progress) -> str:
    if first is not None:
        difference = f"{'' if first.begins else 'at '}{compare.place(first)}; {compare.digest_difference(first)}"
        return _differ_text(facts, difference)
    if not found.digests:
        return "nothing to compare: they have no step of a replica in common"
    counts = f"{counted(len(found.steps), 'step')}, {counted(replicas, 'replica')}, {found.digests:,} digests"
    return f"equal{'' if whole else ' as far as both have recorded'}: {counts}{_though(facts)}"


def _differ_text(facts: str, difference: str) -> str:
    return (f"not comparable bit by bit: {facts}; " if facts else "") + f"they first differ {difference}"


def _though(facts: str) -> str:
    return f", though {facts}" if facts else ""


def _runs_notes(a: Recording, b: Recording, found: _Progress) -> Iterator[str]:
    for name, start in zip("AB", found.starts, strict=True):
        if start is not None and start > min(one for one in found.starts if one is not None):
            yield f"{name} begins at step {start}"
    for name, run, ends in (("A", a.run, found.ends[0]), ("B", b.run, found.ends[1])):
        if found.ends[0] != found.ends[1] and ends:
            first, last = min(ends, key=ends.__getitem__), max(ends.values())
            planned = f", and was to record up to step {run.last_step}" if last < run.last_step else ""
            yield f"{name} ends after step {last}{planned}"
            if ends[first] < last:
                yield f"replica {first} of {name} ends after step {ends[first]}"
    for name, ours, theirs in (("A", a, b), ("B", b, a)):
        alone = [str(replica) for replica in ours.replicas if replica not in theirs.replicas]
        if alone:
            yield f"only {name} has {'replica' if len(alone) == 1 else 'replicas'} {', '.join(alone)}"
    for name, count in (("A", found.only_in_a), ("B", found.only_in_b)):
        if count:
            yield f"{counted(count, 'digest')} of common steps only in {name}, without a counterpart by name"
    if a.run.sees != b.run.sees:
        yield f"A has the {a.run.sees}, B the {b.run.sees}"
    if a.run.pef_digest != b.run.pef_digest:
        yield "the PEFs differ: sambasim compare A.pef B.pef says where"


_STEP_FIELDS = ("loss", "lr", "grad_norm")
_EVALUATION_FIELDS = ("loss", "accuracy", "samples")
_DIGEST_FIELDS = ("weights_sha256", "state_sha256")


def compare_metrics(
    a: tuple[str, RunRecords], b: tuple[str, RunRecords], wanted: Callable[[int], bool] = lambda step: True
) -> MetricsCompared:
    ours, theirs = ({one.step: one for one in records.steps if wanted(one.step)} for _, records in (a, b))
    common = [step for step in ours if step in theirs]
    differences = (
        _step_difference(step, name, getattr(ours[step], name), getattr(theirs[step], name))
        for step in common
        for name in _STEP_FIELDS
    )
    first = next(filter(None, differences), None)
    one, other = a[1].summary, b[1].summary
    facts = compare.differing_facts(*map(compare.deciding_facts, (one, other))) if one and other else ()
    results = compare.differing_facts(*_results(a[1], b[1]))
    differ = first or next((f"{one.name}: {one.a} and {one.b}" for one in results), None)
    losses = [(step, _finite(ours[step].loss), _finite(theirs[step].loss)) for step in common]
    whole = ours.keys() == theirs.keys()
    return MetricsCompared(
        a=a[0],
        b=b[0],
        equal=differ is None and whole and bool(ours),
        verdict=_metrics_verdict(differ, compare.facts_text(facts), len(common), whole=whole),
        not_comparable=facts,
        steps=len(common),
        first=first,
        losses=compare.differing_losses(losses),
        results=results,
        notes=tuple(_metrics_notes(list(ours), list(theirs), (one, other))),
    )


def _metrics_verdict(differ: str | None, facts: str, steps: int, *, whole: bool) -> str:
    if differ is not None:
        return _differ_text(facts, f"at {differ}")
    if not steps:
        return "nothing to compare: they have no step in common"
    return f"equal: losses of {counted(steps, 'step')}{'' if whole else ', as far as both go'}{_though(facts)}"


def _step_difference(step: int, name: str, a: float | None, b: float | None) -> str | None:
    if repr(a) == repr(b):  # NaNs are equal, and -0.0 differs from 0.0
        return None
    relative = relative_difference(_finite(a), _finite(b))
    much = "" if relative is None else f", {relative:.1e} apart"
    return f"step {step}: {name} {a!r} and {b!r}{much}"


def _results(a: RunRecords, b: RunRecords) -> tuple[Mapping[str, object], Mapping[str, object]]:
    ours, theirs = _evaluations(a), _evaluations(b)
    common = [name for name in ours if name in theirs]
    found = {name: ours[name] for name in common}, {name: theirs[name] for name in common}
    if a.summary is not None and b.summary is not None and a.summary.steps == b.summary.steps:
        for results, summary in zip(found, (a.summary, b.summary), strict=True):
            results.update({name: getattr(summary, name) for name in _DIGEST_FIELDS})
    return found


def _evaluations(records: RunRecords) -> dict[str, object]:
    return {
        f"evaluation after step {one.step}, {name}": getattr(one, name)
        for one in records.evaluations
        for name in _EVALUATION_FIELDS
    }


def _metrics_notes(
    steps_a: list[int], steps_b: list[int], summaries: tuple[SummaryRecord | None, SummaryRecord | None]
) -> Iterator[str]:
    for name, steps, others, summary in (("A", steps_a, steps_b, summaries[0]), ("B", steps_b, steps_a, summaries[1])):
        if steps and others and steps[-1] != others[-1]:
            yield f"{name} ends after step {steps[-1]}"
        if summary is None:
            yield f"{name} has no summary: that run failed or is still running; its threads and engine are unknown"
    yield "times are not compared; `run --record-digests` finds the first tensor in which two runs differ"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
