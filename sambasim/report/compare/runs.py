"""Compares two runs: recordings of digests, and metrics files. Tensors are matched by name, in the order in which the
first run computed them; at equal positions the lowest replica comes first."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby, product
from typing import NamedTuple

from sambasim.records.digests import RecordedRun, Recording, StepDigests, ValueDigest
from sambasim.records.metrics import RunRecords, StepRecord, SummaryRecord
from sambasim.report.compare import NOTHING, differing_facts, digest_difference, place, plural
from sambasim.report.tables import Row
from sambasim.units import counted

_MOST_SHOWN = 6
_SHORT_DIGEST = 12
_COMPARED_APART = ("training.seed", "training.batch_size")
"""Options that are deciding facts themselves, or part of the PEF."""


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


class _RunsComparison:
    """Steps are added in order; then `result` has what was found."""

    def __init__(self, a: Recording, b: Recording) -> None:
        self.sides = a, b
        self.replicas = tuple(sorted({*a.replicas} & {*b.replicas}))
        self.titles = {section.number: f"{section.number} {section.kind} {section.name}" for section in a.run.sections}
        self.digests = self.equal_before = 0
        self.differences: list[Row] = []
        self.last_equal: _Pair | None = None
        self.by_step: Counter[int] = Counter()
        self.losses: dict[int, tuple[float | None, float | None]] = {}
        self.only_in: Counter[int] = Counter()
        self.starts: dict[int, int] = {}
        self.ends: tuple[dict[int, int], dict[int, int]] = ({}, {})

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
            # In the order of computation. The section is not part of the key: another program may have others.
            ours, theirs = (
                {(value.what, value.name, value.micro_step): value for value in sides[side].values} for side in (0, 1)
            )
            if sides[0].begins == sides[1].begins:  # otherwise one is a whole step, and the other only the state after
                self.only_in += Counter({0: len(ours.keys() - theirs.keys()), 1: len(theirs.keys() - ours.keys())})
            for position, (key, digest) in enumerate(ours.items()):
                if key in theirs:
                    pairs.append((position, _Pair(step, replica, digest, theirs[key], begins)))
        for _, pair in sorted(pairs, key=lambda row: (row[0], row[1].replica)):
            self.digests += 1
            last = self.differences[-1] if self.differences else None
            if pair.a.digest == pair.b.digest:
                if last is None:
                    self.equal_before += 1
                    self.last_equal = pair
                continue
            self.by_step[step] += 1
            if last is not None and (last.step, last.what, last.name, last.micro_step) == (step, *pair.a[:3]):
                self.differences[-1] = last.model_copy(update={"replicas": (*last.replicas, pair.replica)})
            elif len(self.differences) < _MOST_SHOWN:
                self.differences.append(self._difference(pair))

    def _difference(self, pair: _Pair) -> Row:
        """`replicas` are those in which the digests differ; the numbers are those of the first.
        `relative_norm_difference` is None if a norm is not finite."""
        a, b = pair.a, pair.b
        title = None if a.section is None else self.titles.get(a.section, str(a.section))
        where = {"micro_step": a.micro_step, "section": a.section, "section_title": title}
        relative = _relative_difference(a.norm, b.norm)
        norms = {"norm_a": a.norm, "norm_b": b.norm, "relative_norm_difference": relative}
        not_finite = {"not_finite_a": a.not_finite, "not_finite_b": b.not_finite}
        what = {**where, "what": a.what, "name": a.name, **norms, **not_finite}
        return Row(step=pair.step, replicas=(pair.replica,), **what, begins=pair.begins)

    def result(self) -> Row:
        """`first` is the first tensor that differs, in the order in which a step computes them. `not_comparable` are
        facts that explain different bits, the most important first; `other_options` are all other options that
        differ."""
        a, b = self.sides
        facts = differing_facts(_deciding_facts(a.run), _deciding_facts(b.run))
        whole = a.replicas == b.replicas and self.ends[0] == self.ends[1] and not any(self.only_in.values())
        first = self.differences[0] if self.differences else None
        if first is not None:
            at = "" if first.begins else "at "
            verdict = _differ_text(facts, f"{at}{place(first)}; {digest_difference(first)}")
        elif self.digests:
            steps, of_replicas = counted(len(self.losses), "step"), counted(len(self.replicas), "replica")
            far = "" if whole else " as far as both have recorded"
            verdict = f"equal{far}: {steps}, {of_replicas}, {self.digests:,} digests{_facts_text(', though {}', facts)}"
        else:
            verdict = "nothing to compare: they have no step of a replica in common"
        last = place(self._difference(self.last_equal)) if first is not None and self.last_equal is not None else None
        options = ({k: v for k, v in side.run.options.items() if k not in _COMPARED_APART} for side in self.sides)
        return Row(
            kind="runs",
            a=str(a.folder),
            b=str(b.folder),
            equal=first is None and whole and self.digests > 0,
            verdict=verdict,
            not_comparable=facts,
            other_options=differing_facts(*options),
            steps=len(self.losses),
            replicas=self.replicas,
            digests=self.digests,
            first=first,
            equal_before=self.equal_before,
            last_equal=last,
            next_differences=self.differences[1:],
            differing_by_step=dict(list(self.by_step.items())[:_MOST_SHOWN]),
            losses=_differing_losses([(step, *both) for step, both in self.losses.items()]),
            only_in_a=self.only_in[0],
            only_in_b=self.only_in[1],
            notes=list(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        a, b = self.sides
        for side, start in sorted(self.starts.items()):
            if start > min(self.starts.values()):
                yield f"{'AB'[side]} begins at step {start}"
        for name, recording, ends in zip("AB", self.sides, self.ends, strict=True):
            if self.ends[0] != self.ends[1] and ends:
                first, last = min(ends, key=ends.__getitem__), max(ends.values())
                until = recording.run.last_step
                planned = f", and was to record up to step {until}" if last < until else ""
                yield f"{name} ends after step {last}{planned}"
                if ends[first] < last:
                    yield f"replica {first} of {name} ends after step {ends[first]}"
        for name, recording in zip("AB", self.sides, strict=True):
            if alone := [str(replica) for replica in recording.replicas if replica not in self.replicas]:
                yield f"only {name} has {plural('replica', alone)} {', '.join(alone)}"
        for side, count in sorted(self.only_in.items()):
            digests = f"{counted(count, 'digest')} of common steps"
            yield f"{digests} only in {'AB'[side]}, without a counterpart by name"
        if a.run.sees != b.run.sees:
            yield f"A has the {a.run.sees}, B the {b.run.sees}"
        if a.run.pef_digest != b.run.pef_digest:
            yield "the PEFs differ: sambasim compare A.pef B.pef says where"


def compare_runs(a: Recording, b: Recording, wanted: Callable[[int], bool] = lambda step: True) -> Row:
    """Compare the steps of two recordings for which `wanted` is true. Raises what `Recording.steps` raises."""

    def lines_of(recording: Recording, replica: int, side: int) -> Iterator[_Line]:
        for line in recording.steps(replica):
            if wanted(line.step) or (line.begins and wanted(line.step + 1)):
                yield _Line(line.step, replica, side, line)

    found = _RunsComparison(a, b)
    recorded = [lines_of(of_side, replica, side) for replica in found.replicas for side, of_side in enumerate((a, b))]
    for step, lines in groupby(merge(*recorded, key=lambda line: line[:3]), key=lambda line: line.step):
        found.add_step(step, lines)
    return found.result()


def _deciding_facts(run: RecordedRun | SummaryRecord) -> Mapping[str, object]:
    """Facts that explain different bits, the most important first."""
    # The row "engine" shows --engine.
    exempt = (reason for reason in run.exempt_from_exactness if not reason.startswith("--engine"))
    pef = run.pef_digest[:_SHORT_DIGEST]
    facts = {
        "threads": run.threads,
        "engine": run.engine,
        "torch": run.torch,
        "CPU": run.cpu if isinstance(run, RecordedRun) else None,
        "exempt": "; ".join(exempt) or None,
        "world size": run.world_size,
        "seed": run.seed,
        "PEF": f"{run.pef} {pef}" if isinstance(run, RecordedRun) else pef,
    }
    if isinstance(run, SummaryRecord):
        facts |= {"batch size": run.batch_size, "accumulation steps": run.accumulation_steps}
    return facts


def _facts_text(sentence: str, facts: Sequence[Row]) -> str:
    """`sentence` with the facts; empty without any."""

    def text(fact: Row) -> str:
        if fact.a == NOTHING:
            return f"{fact.name} {fact.b} in B alone"
        return f"{fact.name} {fact.a} in A alone" if fact.b == NOTHING else f"{fact.name} {fact.a} and {fact.b}"

    return sentence.format(", ".join(map(text, facts))) if facts else ""


def _differ_text(facts: Sequence[Row], difference: str) -> str:
    return f"{_facts_text('not comparable bit by bit: {}; ', facts)}they first differ {difference}"


def _relative_difference(a: float | None, b: float | None) -> float | None:
    """The difference, relative to the larger number; None if one is None."""
    if a is None or b is None:
        return None
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def _differing_losses(losses: Sequence[tuple[int, float | None, float | None]]) -> list[Row]:
    """The first step whose losses differ, then steps at doubling distances, and the last. Empty if all are equal."""
    first = next((index for index, (_, a, b) in enumerate(losses) if a != b), None)
    if first is None:
        return []
    last, distance, chosen = len(losses) - 1, 1, [first]
    while first + distance < last:
        chosen.append(first + distance)
        distance *= 2
    rows = [losses[index] for index in dict.fromkeys([*chosen, last])]
    return [Row(step=step, a=a, b=b, relative=_relative_difference(a, b)) for step, a, b in rows]


def compare_metrics(
    a: tuple[str, RunRecords], b: tuple[str, RunRecords], wanted: Callable[[int], bool] = lambda step: True
) -> Row:
    ours, theirs = ({line.step: line for line in records.steps if wanted(line.step)} for _, records in (a, b))
    common = [step for step in ours if step in theirs]
    names = product(common, ("loss", "lr", "grad_norm"))
    differences = (_step_difference(step, name, ours[step], theirs[step]) for step, name in names)
    first = next(filter(None, differences), None)
    summaries = a[1].summary, b[1].summary
    facts = differing_facts(*map(_deciding_facts, filter(None, summaries))) if all(summaries) else []
    results = differing_facts(*_results(a[1], b[1]))
    differ = first or next((f"{fact.name}: {fact.a} and {fact.b}" for fact in results), None)
    whole = ours.keys() == theirs.keys()
    if differ is not None:
        verdict = _differ_text(facts, f"at {differ}")
    elif common:
        far = "" if whole else ", as far as both go"
        verdict = f"equal: losses of {counted(len(common), 'step')}{far}{_facts_text(', though {}', facts)}"
    else:
        verdict = "nothing to compare: they have no step in common"
    equal, notes = differ is None and whole and bool(ours), list(_metrics_notes((list(ours), list(theirs)), summaries))
    losses = _differing_losses([(step, _finite(ours[step].loss), _finite(theirs[step].loss)) for step in common])
    found = {"not_comparable": facts, "steps": len(common), "first": first, "losses": losses, "results": results}
    return Row(kind="metrics", a=a[0], b=b[0], equal=equal, verdict=verdict, **found, notes=notes)


def _step_difference(step: int, name: str, ours: StepRecord, theirs: StepRecord) -> str | None:
    a, b = getattr(ours, name), getattr(theirs, name)
    if repr(a) == repr(b):  # NaNs are equal, and -0.0 differs from 0.0
        return None
    relative = _relative_difference(_finite(a), _finite(b))
    much = "" if relative is None else f", {relative:.1e} apart"
    return f"step {step}: {name} {a!r} and {b!r}{much}"


def _results(a: RunRecords, b: RunRecords) -> list[dict[str, object]]:
    """What both runs have: their evaluations, and their digests after equally many steps."""

    def evaluations(records: RunRecords) -> dict[str, object]:
        pairs = product(records.evaluations, ("loss", "accuracy", "samples"))
        return {f"evaluation after step {line.step}, {name}": getattr(line, name) for line, name in pairs}

    results = [evaluations(a), evaluations(b)]
    if a.summary is not None and b.summary is not None and a.summary.steps == b.summary.steps:
        for of_run, summary in zip(results, (a.summary, b.summary), strict=True):
            of_run |= {name: getattr(summary, name) for name in ("weights_sha256", "state_sha256")}
    common = [name for name in results[0] if name in results[1]]
    return [{name: of_run[name] for name in common} for of_run in results]


def _metrics_notes(steps: tuple[list[int], list[int]], summaries: Sequence[SummaryRecord | None]) -> Iterator[str]:
    for name, mine, summary in zip("AB", steps, summaries, strict=True):
        if all(steps) and steps[0][-1] != steps[1][-1]:
            yield f"{name} ends after step {mine[-1]}"
        if summary is None:
            yield f"{name} has no summary: that run failed or is still running; its threads and engine are unknown"
    yield "times are not compared; `run --record-digests` finds the first tensor in which two runs differ"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
