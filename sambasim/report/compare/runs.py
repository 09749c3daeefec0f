"""Compares two runs: recordings of digests, and metrics files. Tensors are matched by name, in the order in which the
first run computed them; at equal positions the lowest replica comes first."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from typing import NamedTuple

from sambasim.records.digests import Recording, StepDigests, ValueDigest
from sambasim.records.metrics import RunRecords, SummaryRecord
from sambasim.report import compare
from sambasim.report.compare import DigestDifference, MetricsCompared, RunsCompared, plural, relative_difference
from sambasim.units import counted

_MOST_SHOWN = 6


class _Line(NamedTuple):
    step: int
    replica: int
    side: int
    digests: StepDigests


class _Pair(NamedTuple):
    """The digests of one tensor in both runs. `begins`: of the state before the first step of one of them."""

    step: int
    replica: int
    a: ValueDigest
    b: ValueDigest
    begins: bool


@dataclass(slots=True)
class _Progress:
    titles: dict[int, str]
    digests: int = 0
    differences: list[DigestDifference] = field(default_factory=list)
    equal_before: int = 0
    last_equal: _Pair | None = None
    by_step: Counter[int] = field(default_factory=Counter)
    losses: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    only_in: Counter[int] = field(default_factory=Counter)
    starts: dict[int, int] = field(default_factory=dict)
    ends: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))

    def add_step(self, step: int, lines: Iterable[_Line]) -> None:
        pairs: list[tuple[int, _Pair]] = []
        for replica, of_replica in groupby(lines, key=lambda line: line.replica):
            sides = {line.side: line.digests for line in of_replica}
            for side, digests in sides.items():
                self.ends[side][replica] = step
                if not digests.begins:
                    self.starts.setdefault(side, step)
            if len(sides) == 1:
                continue
            begins = any(digests.begins for digests in sides.values())
            if not begins:
                self.losses.setdefault(step, (sides[0].loss, sides[1].loss))
            ours, theirs = _by_name(sides[0]), _by_name(sides[1])
            if sides[0].begins == sides[1].begins:  # otherwise one is a whole step, and the other only the state after
                self.only_in[0] += len(ours.keys() - theirs.keys())
                self.only_in[1] += len(theirs.keys() - ours.keys())
            for position, (key, digest) in enumerate(ours.items()):
                if key in theirs:
                    pairs.append((position, _Pair(step, replica, digest, theirs[key], begins)))
        for _, pair in sorted(pairs, key=lambda row: (row[0], row[1].replica)):
            self.digests += 1
            if pair.a.digest != pair.b.digest:
                self.by_step[step] += 1
                self._add_difference(pair)
            elif not self.differences:
                self.equal_before += 1
                self.last_equal = pair

    def _add_difference(self, pair: _Pair) -> None:
        """Add a tensor that differs, or add the replica to the last one if it is the same tensor."""
        last = self.differences[-1] if self.differences else None
        if last is not None and (last.step, last.what, last.name, last.micro_step) == (pair.step, *pair.a[:3]):
            self.differences[-1] = last.model_copy(update={"replicas": (*last.replicas, pair.replica)})
        elif len(self.differences) < _MOST_SHOWN:
            self.differences.append(self.difference(pair))

    def difference(self, pair: _Pair) -> DigestDifference:
        section = pair.a.section
        return DigestDifference(
            step=pair.step,
            replicas=(pair.replica,),
            micro_step=pair.a.micro_step,
            section=section,
            section_title=None if section is None else self.titles.get(section, str(section)),
            what=pair.a.what,
            name=pair.a.name,
            norm_a=pair.a.norm,
            norm_b=pair.b.norm,
            relative_norm_difference=relative_difference(pair.a.norm, pair.b.norm),
            not_finite_a=pair.a.not_finite,
            not_finite_b=pair.b.not_finite,
            begins=pair.begins,
        )


def compare_runs(a: Recording, b: Recording, wanted: Callable[[int], bool] = lambda step: True) -> RunsCompared:
    """Compare the steps of two recordings for which `wanted` is true. Raises what `Recording.steps` raises."""
    progress = _Progress(
        {section.number: f"{section.number} {section.kind} {section.name}" for section in a.run.sections}
    )
    replicas = tuple(sorted({*a.replicas} & {*b.replicas}))
    recorded = [
        _lines(recording, replica, side, wanted) for replica in replicas for side, recording in enumerate((a, b))
    ]
    for step, lines in groupby(merge(*recorded, key=lambda line: line[:3]), key=lambda line: line.step):
        progress.add_step(step, lines)
    return _runs_result(a, b, replicas, progress)


def _lines(recording: Recording, replica: int, side: int, wanted: Callable[[int], bool]) -> Iterator[_Line]:
    for line in recording.steps(replica):
        if wanted(line.step) or (line.begins and wanted(line.step + 1)):
            yield _Line(line.step, replica, side, line)


def _by_name(line: StepDigests) -> dict[tuple[str, str, int | None], ValueDigest]:
    """In the order of computation. The section is not part of the key: another program may have other sections."""
    return {(value.what, value.name, value.micro_step): value for value in line.values}


def _runs_result(a: Recording, b: Recording, replicas: tuple[int, ...], progress: _Progress) -> RunsCompared:
    facts = compare.differing_facts(compare.deciding_facts(a.run), compare.deciding_facts(b.run))
    whole = a.replicas == b.replicas and progress.ends[0] == progress.ends[1] and not any(progress.only_in.values())
    first = progress.differences[0] if progress.differences else None
    last_equal = None if first is None or progress.last_equal is None else progress.difference(progress.last_equal)
    though = compare.facts_text(facts)
    if first is not None:
        where = f"{'' if first.begins else 'at '}{compare.place(first)}"
        verdict = _differ_text(though, f"{where}; {compare.digest_difference(first)}")
    elif progress.digests:
        steps, of_replicas = counted(len(progress.losses), "step"), counted(len(replicas), "replica")
        far = "" if whole else " as far as both have recorded"
        verdict = f"equal{far}: {steps}, {of_replicas}, {progress.digests:,} digests{_though(though)}"
    else:
        verdict = "nothing to compare: they have no step of a replica in common"
    return RunsCompared(
        a=str(a.folder),
        b=str(b.folder),
        equal=first is None and whole and progress.digests > 0,
        verdict=verdict,
        not_comparable=facts,
        other_options=compare.differing_options(a.run, b.run),
        steps=len(progress.losses),
        replicas=replicas,
        digests=progress.digests,
        first=first,
        equal_before=progress.equal_before,
        last_equal=last_equal and compare.place(last_equal),
        next_differences=tuple(progress.differences[1:]),
        differing_by_step=dict(list(progress.by_step.items())[:_MOST_SHOWN]),
        losses=compare.differing_losses([(step, *both) for step, both in progress.losses.items()]),
        only_in_a=progress.only_in[0],
        only_in_b=progress.only_in[1],
        notes=tuple(_runs_notes(a, b, progress)),
    )


def _differ_text(facts: str, difference: str) -> str:
    return (f"not comparable bit by bit: {facts}; " if facts else "") + f"they first differ {difference}"


def _though(facts: str) -> str:
    return f", though {facts}" if facts else ""


def _runs_notes(a: Recording, b: Recording, progress: _Progress) -> Iterator[str]:
    for side, start in sorted(progress.starts.items()):
        if start > min(progress.starts.values()):
            yield f"{'AB'[side]} begins at step {start}"
    for name, run, ends in (("A", a.run, progress.ends[0]), ("B", b.run, progress.ends[1])):
        if progress.ends[0] != progress.ends[1] and ends:
            first, last = min(ends, key=ends.__getitem__), max(ends.values())
            planned = f", and was to record up to step {run.last_step}" if last < run.last_step else ""
            yield f"{name} ends after step {last}{planned}"
            if ends[first] < last:
                yield f"replica {first} of {name} ends after step {ends[first]}"
    for name, ours, theirs in (("A", a, b), ("B", b, a)):
        alone = [str(replica) for replica in ours.replicas if replica not in theirs.replicas]
        if alone:
            yield f"only {name} has {plural('replica', alone)} {', '.join(alone)}"
    for side, name in enumerate("AB"):
        if count := progress.only_in[side]:
            yield f"{counted(count, 'digest')} of common steps only in {name}, without a counterpart by name"
    if a.run.sees != b.run.sees:
        yield f"A has the {a.run.sees}, B the {b.run.sees}"
    if a.run.pef_digest != b.run.pef_digest:
        yield "the PEFs differ: sambasim compare A.pef B.pef says where"


def compare_metrics(
    a: tuple[str, RunRecords], b: tuple[str, RunRecords], wanted: Callable[[int], bool] = lambda step: True
) -> MetricsCompared:
    ours, theirs = ({line.step: line for line in records.steps if wanted(line.step)} for _, records in (a, b))
    common = [step for step in ours if step in theirs]
    differences = (
        _step_difference(step, name, getattr(ours[step], name), getattr(theirs[step], name))
        for step in common
        for name in ("loss", "lr", "grad_norm")
    )
    first = next(filter(None, differences), None)
    summaries = a[1].summary, b[1].summary
    facts = compare.differing_facts(*map(compare.deciding_facts, filter(None, summaries))) if all(summaries) else ()
    though = compare.facts_text(facts)
    results = compare.differing_facts(*_results(a[1], b[1]))
    differ = first or next((f"{fact.name}: {fact.a} and {fact.b}" for fact in results), None)
    whole = ours.keys() == theirs.keys()
    if differ is not None:
        verdict = _differ_text(though, f"at {differ}")
    elif common:
        far = "" if whole else ", as far as both go"
        verdict = f"equal: losses of {counted(len(common), 'step')}{far}{_though(though)}"
    else:
        verdict = "nothing to compare: they have no step in common"
    losses = [(step, _finite(ours[step].loss), _finite(theirs[step].loss)) for step in common]
    return MetricsCompared(
        a=a[0],
        b=b[0],
        equal=differ is None and whole and bool(ours),
        verdict=verdict,
        not_comparable=facts,
        steps=len(common),
        first=first,
        losses=compare.differing_losses(losses),
        results=results,
        notes=tuple(_metrics_notes(list(ours), list(theirs), summaries)),
    )


def _step_difference(step: int, name: str, a: float | None, b: float | None) -> str | None:
    if repr(a) == repr(b):  # NaNs are equal, and -0.0 differs from 0.0
        return None
    relative = relative_difference(_finite(a), _finite(b))
    much = "" if relative is None else f", {relative:.1e} apart"
    return f"step {step}: {name} {a!r} and {b!r}{much}"


def _results(a: RunRecords, b: RunRecords) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """What both runs have: their evaluations, and their digests after equally many steps."""
    ours, theirs = _evaluations(a), _evaluations(b)
    if a.summary is not None and b.summary is not None and a.summary.steps == b.summary.steps:
        for results, summary in ((ours, a.summary), (theirs, b.summary)):
            results |= {name: getattr(summary, name) for name in ("weights_sha256", "state_sha256")}
    common = [name for name in ours if name in theirs]
    return {name: ours[name] for name in common}, {name: theirs[name] for name in common}


def _evaluations(records: RunRecords) -> dict[str, object]:
    return {
        f"evaluation after step {evaluation.step}, {name}": getattr(evaluation, name)
        for evaluation in records.evaluations
        for name in ("loss", "accuracy", "samples")
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
