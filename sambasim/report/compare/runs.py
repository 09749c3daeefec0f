"""Compares two runs: recordings of digests, and metrics files.

Recordings: finds the first step, section and tensor whose digests differ. Tensors are matched by name, so runs of
different programs are compared as far as they share names. Within a step tensors have the order in which the first run
computed them; at equal positions the lowest replica comes first.

Metrics files: finds the first step whose loss, learning rate or gradient norm differs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple

from sambasim.records.digests import RecordedRun, Recording, StepDigests, ValueDigest
from sambasim.records.metrics import RunRecords, SummaryRecord
from sambasim.report.compare.result import (
    DigestApart,
    MetricsCompared,
    RunsCompared,
    deciding_facts,
    deciding_facts_of_summaries,
    differing_facts,
    differing_losses,
    differing_options,
    digest_difference,
    facts_text,
    place,
    relative_difference,
)

_MOST_SHOWN = 6


class _Pair(NamedTuple):
    """The lines of one replica at one step; None if a run has none."""

    step: int
    replica: int
    a: StepDigests | None
    b: StepDigests | None


@dataclass(slots=True)
class _Progress:
    """What the comparison has found so far."""

    titles: dict[int, str]
    digests: int = 0
    steps: set[int] = field(default_factory=set)
    apart: list[DigestApart] = field(default_factory=list)
    alike_before: int = 0
    last_alike: tuple[int, int, ValueDigest, bool] | None = None
    by_step: dict[int, int] = field(default_factory=dict)
    losses: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    only_in_a: int = 0
    only_in_b: int = 0
    starts: list[int | None] = field(default_factory=lambda: [None, None])
    ends: list[int] = field(default_factory=lambda: [-1, -1])


def compare_runs(a: Recording, b: Recording, wanted: Callable[[int], bool] = lambda step: True) -> RunsCompared:
    """Compare the steps of two recordings for which `wanted` is true. Raises what `Recording.steps` raises."""
    found = _Progress({one.number: f"{one.number} {one.kind} {one.name}" for one in a.run.sections})
    replicas = tuple(sorted({*a.replicas} & {*b.replicas}))
    step: list[_Pair] = []
    for pair in merge(*(_pairs(a, b, replica, wanted) for replica in replicas), key=lambda one: one[:2]):
        if step and step[0].step != pair.step:
            _compare_step(step, found)
            step = []
        step.append(pair)
    _compare_step(step, found)
    return _runs_result(a, b, replicas, found)


def _pairs(a: Recording, b: Recording, replica: int, wanted: Callable[[int], bool]) -> Iterator[_Pair]:
    ours, theirs = _lines(a, replica, wanted), _lines(b, replica, wanted)
    one, other = next(ours, None), next(theirs, None)
    while one is not None or other is not None:
        step = min(line.step for line in (one, other) if line is not None)
        left = one if one is not None and one.step == step else None
        right = other if other is not None and other.step == step else None
        yield _Pair(step, replica, left, right)
        one = next(ours, None) if left is not None else one
        other = next(theirs, None) if right is not None else other


def _lines(recording: Recording, replica: int, wanted: Callable[[int], bool]) -> Iterator[StepDigests]:
    for line in recording.steps(replica):
        if wanted(line.step) or (line.begins and wanted(line.step + 1)):
            yield line


def _compare_step(pairs: Sequence[_Pair], found: _Progress) -> None:
    """Compare all replicas of one step."""
    seen: list[tuple[int, int, ValueDigest, ValueDigest]] = []
    begins = False
    for pair in pairs:
        for side, line in enumerate((pair.a, pair.b)):
            if line is not None:
                found.ends[side] = max(found.ends[side], line.step)
                if found.starts[side] is None and not line.begins:
                    found.starts[side] = line.step
        if pair.a is None or pair.b is None:
            continue
        begins = pair.a.begins or pair.b.begins
        if not begins:
            found.steps.add(pair.step)
            found.losses.setdefault(pair.step, (pair.a.loss, pair.b.loss))
        ours, theirs = _by_name(pair.a), _by_name(pair.b)
        if pair.a.begins == pair.b.begins:  # otherwise one is a whole step, and the other only the state after it
            found.only_in_a += len(ours.keys() - theirs.keys())
            found.only_in_b += len(theirs.keys() - ours.keys())
        seen += [(position, pair.replica, ours[key], theirs[key]) for position, key in enumerate(ours) if key in theirs]
    for _, replica, one, other in sorted(seen, key=lambda row: row[:2]):
        found.digests += 1
        if one.digest != other.digest:
            found.by_step[pairs[0].step] = found.by_step.get(pairs[0].step, 0) + 1
            _add_difference(found, pairs[0].step, replica, one, other, begins=begins)
        elif not found.apart:
            found.alike_before += 1
            found.last_alike = (pairs[0].step, replica, one, begins)


def _add_difference(
    found: _Progress, step: int, replica: int, one: ValueDigest, other: ValueDigest, *, begins: bool
) -> None:
    """Add a tensor that differs, or add the replica to the last one if it is the same tensor."""
    last = found.apart[-1] if found.apart else None
    if last is not None and (last.step, last.what, last.name, last.micro_step) == (step, *one[:3]):
        found.apart[-1] = last.model_copy(update={"replicas": (*last.replicas, replica)})
    elif len(found.apart) < _MOST_SHOWN:
        found.apart.append(_apart(step, replica, one, other, found.titles, begins=begins))


def _by_name(line: StepDigests) -> dict[tuple[str, str, int | None], ValueDigest]:
    """In the order of computation. The section is not part of the key: another program may have other sections."""
    return {(one.what, one.name, one.micro_step): one for one in line.values}


def _apart(
    step: int, replica: int, one: ValueDigest, other: ValueDigest, titles: dict[int, str], *, begins: bool
) -> DigestApart:
    return DigestApart(
        step=step,
        replicas=(replica,),
        micro_step=one.micro_step,
        section=one.section,
        section_title=None if one.section is None else titles.get(one.section, str(one.section)),
        what=one.what,
        name=one.name,
        norm_a=one.norm,
        norm_b=other.norm,
        norms_apart=relative_difference(one.norm, other.norm),
        not_finite_a=one.not_finite,
        not_finite_b=other.not_finite,
        begins=begins,
    )


def _runs_result(a: Recording, b: Recording, replicas: tuple[int, ...], found: _Progress) -> RunsCompared:
    right = deciding_facts(a.run, b.run)
    notes = tuple(_runs_notes(a, b, found))
    whole = a.replicas == b.replicas and found.ends[0] == found.ends[1] and not (found.only_in_a or found.only_in_b)
    first = found.apart[0] if found.apart else None
    return RunsCompared(
        a=str(a.folder),
        b=str(b.folder),
        alike=first is None and whole and found.digests > 0,
        verdict=_runs_verdict(first, facts_text(right), whole, len(replicas), found),
        not_comparable=right,
        asked_otherwise=differing_options(a.run, b.run),
        steps=len(found.steps),
        replicas=replicas,
        digests=found.digests,
        first=first,
        alike_before=found.alike_before,
        last_alike=_last_alike(found),
        then=tuple(found.apart[1:]),
        differing_by_step=dict(list(found.by_step.items())[:_MOST_SHOWN]),
        losses=differing_losses([(step, *both) for step, both in found.losses.items()]),
        only_in_a=found.only_in_a,
        only_in_b=found.only_in_b,
        notes=notes,
    )


def _last_alike(found: _Progress) -> str | None:
    if found.last_alike is None or not found.apart:
        return None
    step, replica, one, begins = found.last_alike
    return place(_apart(step, replica, one, one, found.titles, begins=begins))


def _runs_verdict(first: DigestApart | None, right: str, whole: bool, replicas: int, found: _Progress) -> str:
    if first is not None:
        before = f"not comparable bit by bit: {right}; " if right else ""
        return f"{before}they first differ {'' if first.begins else 'at '}{place(first)}; {digest_difference(first)}"
    if not found.digests:
        return "nothing to compare: they have no step of a replica in common"
    though = f", though {right}" if right else ""
    counts = f"{_counted(len(found.steps), 'step')}, {_counted(replicas, 'replica')}, {found.digests:,} digests"
    return f"alike: {counts}{though}" if whole else f"alike as far as both have recorded: {counts}{though}"


def _runs_notes(a: Recording, b: Recording, found: _Progress) -> Iterator[str]:
    for name, start in zip("AB", found.starts, strict=True):
        if start is not None and start > min(one for one in found.starts if one is not None):
            yield f"{name} begins at step {start}"
    for name, run, end in (("A", a.run, found.ends[0]), ("B", b.run, found.ends[1])):
        if found.ends[0] != found.ends[1] and end >= 0:
            yield f"{name} ends after step {end}{_planned(run, end)}"
    for name, ours, theirs in (("A", a, b), ("B", b, a)):
        alone = [str(replica) for replica in ours.replicas if replica not in theirs.replicas]
        if alone:
            yield f"only {name} has {'replica' if len(alone) == 1 else 'replicas'} {', '.join(alone)}"
    for name, count in (("A", found.only_in_a), ("B", found.only_in_b)):
        if count:
            yield f"{_counted(count, 'digest')} of common steps only in {name}, without a counterpart by name"
    if a.run.sees != b.run.sees:
        yield f"A has the {a.run.sees}, B the {b.run.sees}"
    if a.run.pef_digest != b.run.pef_digest:
        yield "the PEFs differ: sambasim compare A.pef B.pef says where"


def _planned(run: RecordedRun, end: int) -> str:
    return f", and was to record up to step {run.last_step}" if end < run.last_step else ""


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_STEP_FIELDS = ("loss", "lr", "grad_norm")
_EVALUATION_FIELDS = ("loss", "accuracy", "samples")
_DIGEST_FIELDS = ("weights_sha256", "state_sha256")


def compare_metrics(
    a: tuple[str, RunRecords], b: tuple[str, RunRecords], wanted: Callable[[int], bool] = lambda step: True
) -> MetricsCompared:
    """Compare two metrics files, each given with its path, in the steps for which `wanted` is true."""
    ours, theirs = ({one.step: one for one in records.steps if wanted(one.step)} for _, records in (a, b))
    common = [step for step in ours if step in theirs]
    apart = (
        (step, name)
        for step in common
        for name in _STEP_FIELDS
        if _differ(getattr(ours[step], name), getattr(theirs[step], name))
    )
    first = next((_step_difference(step, name, ours[step], theirs[step]) for step, name in apart), None)
    one, other = a[1].summary, b[1].summary
    right = () if one is None or other is None else deciding_facts_of_summaries(one, other)
    results = differing_facts(*_results(a[1], b[1]))
    notes = tuple(_metrics_notes(list(ours), list(theirs), (one, other)))
    differ = first or next((f"{one.name}: {one.a} and {one.b}" for one in results), None)
    return MetricsCompared(
        a=a[0],
        b=b[0],
        alike=differ is None and ours.keys() == theirs.keys() and bool(ours),
        verdict=_metrics_verdict(differ, facts_text(right), len(common), whole=ours.keys() == theirs.keys()),
        not_comparable=right,
        steps=len(common),
        first=first,
        losses=differing_losses([(step, _finite(ours[step].loss), _finite(theirs[step].loss)) for step in common]),
        results=results,
        notes=notes,
    )


def _metrics_verdict(differ: str | None, right: str, steps: int, *, whole: bool) -> str:
    if differ is not None:
        return (f"not comparable bit by bit: {right}; " if right else "") + f"they first differ at {differ}"
    if not steps:
        return "nothing to compare: they have no step in common"
    counts = f"{steps:,} step{'' if steps == 1 else 's'}"
    return (
        f"alike: losses of {counts}" + ("" if whole else ", as far as both go") + (f", though {right}" if right else "")
    )


def _step_difference(step: int, name: str, a: object, b: object) -> str:
    one, other = getattr(a, name), getattr(b, name)
    relative = relative_difference(_finite(one), _finite(other))
    much = "" if relative is None else f", {relative:.1e} apart"
    return f"step {step}: {name} {one!r} and {other!r}{much}"


def _results(a: RunRecords, b: RunRecords) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Comparable results: evaluations after common steps, and digests if both runs have equally many steps."""
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
    a: list[int], b: list[int], summaries: tuple[SummaryRecord | None, SummaryRecord | None]
) -> Iterator[str]:
    for name, steps, others, summary in (("A", a, b, summaries[0]), ("B", b, a, summaries[1])):
        if steps and others and steps[-1] != others[-1]:
            yield f"{name} ends after step {steps[-1]}"
        if summary is None:
            yield f"{name} has no summary: that run failed or is still running; its threads and engine are unknown"
    yield "times are not compared; `run --record-digests` finds the first tensor in which two runs differ"


def _differ(a: float | None, b: float | None) -> bool:
    return repr(a) != repr(b)  # NaNs are equal, and -0.0 differs from 0.0


def _finite(value: float | None) -> float | None:
    """None for a number that is not finite."""
    return value if value is not None and math.isfinite(value) else None
