"""What `sambasim compare` finds, as rows, text and tables: of recordings and metrics here, of tensors in `tensors`."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby, product
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from sambasim.records.digests import RecordedRun, Recording, StepDigests, ValueDigest
from sambasim.records.metrics import RunRecords, StepRecord, SummaryRecord
from sambasim.report.tables import Row, Table, table, text_table
from sambasim.units import counted

NOTHING = "-"
_MOST_ROWS = 12


def place(difference: Row) -> str:
    """Where in a run a tensor is: `step 3, replica 0, section 2 FWD net__a: value net__relu`."""
    when = f"before step {difference.step + 1}" if difference.begins else f"step {difference.step}"
    micro_step = f", micro-step {difference.micro_step + 1}" if difference.micro_step else ""
    if difference.section_title is not None:
        where = f", section {difference.section_title}"
    else:
        where = "" if difference.begins else ", the batch" if difference.what == "input" else ", after the update"
    replicas = _named("replica", difference.replicas)
    return f"{when}, {replicas}{micro_step}{where}: {difference.what} {difference.name}"


def _named(noun: str, things: Sequence[object], between: str = ", ") -> str:
    """`replicas 0, 2`."""
    return f"{noun if len(things) == 1 else f'{noun}s'} {between.join(map(str, things))}"


def digest_difference(difference: Row) -> str:
    relative = difference.relative_norm_difference
    if relative is None:
        counts = (difference.not_finite_a, difference.not_finite_b)
        return "elements not finite: {} in A, {} in B".format(*(count or "none" for count in counts))
    if relative < 1e-15:
        return "same norm to 15 digits"
    norms = list(dict.fromkeys(f"{norm:.9g}" for norm in (difference.norm_a, difference.norm_b)))
    return f"{_named('norm', norms, ' and ')}, {relative:.1e} apart"


def tensor_difference(difference: Row) -> str:
    if difference.why == "type":
        return f"{difference.type_a} in A, {difference.type_b} in B"
    if difference.why != "values":
        return f"{difference.why}, {difference.type_a or difference.type_b}"
    parts = [f"{difference.differing:,} of {difference.elements:,} elements"]
    if difference.largest_absolute is not None:
        parts.append(f"by {difference.largest_absolute:.3g} at most (relative {difference.largest_relative:.2g})")
    if difference.largest_ulps is not None:
        parts.append(counted(difference.largest_ulps, "ULP"))
    if difference.differing_not_finite:
        parts.append(f"{difference.differing_not_finite:,} of them not finite")
    return ", ".join(parts)


def differing_facts(a: Mapping[str, object], b: Mapping[str, object]) -> list[Row]:
    """The items that differ, in the order of `a`, then those that only `b` has."""

    def text(value: object) -> str:
        return NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    names = (name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name))
    return [Row(name=name, a=text(a.get(name)), b=text(b.get(name))) for name in names]


def comparison(compared: Row) -> Iterator[str | Table]:
    for part in (compared.verdict, *_parts(compared)):
        if isinstance(part, str) or part.rows:
            yield part


def _parts(compared: Row) -> Iterator[str | Table]:
    match compared.kind:
        case "runs":
            if compared.first is not None:
                last = f", the last of them {compared.last_equal}" if compared.last_equal else ""
                yield f"before it: {compared.equal_before:,} digests, all equal{last}"
            yield _facts("different bits are expected", compared.not_comparable)
            yield _facts("other options that differ", compared.other_options)
            then = [(place(difference), digest_difference(difference)) for difference in compared.next_differences]
            yield text_table("next differences", ("where", "how much"), (), then)
            if compared.differing_by_step:
                counts = ", ".join(f"step {step}: {count:,}" for step, count in compared.differing_by_step.items())
                yield f"digests that differ, of {compared.digests:,}: {counts}"
            yield _losses(compared.losses)
        case "metrics":
            yield _facts("different bits are expected", compared.not_comparable)
            yield _losses(compared.losses)
            yield _facts("results", compared.results)
        case "pefs":
            yield _facts("options", compared.options)
            yield from (*compared.symbols[:_MOST_ROWS], *compared.graphs)
            if len(compared.symbols) > _MOST_ROWS:
                yield f"and {len(compared.symbols) - _MOST_ROWS:,} more symbols"
            yield from _tensors("weights that differ", compared.weights)
        case _:
            yield _facts("other facts", compared.facts)
            yield from _tensors("tensors that differ", compared.differences)
    yield from map("note: {}".format, getattr(compared, "notes", ()))


def _tensors(title: str, differences: Sequence[Row]) -> Iterator[str | Table]:
    rows = [(difference.name, tensor_difference(difference)) for difference in differences[:_MOST_ROWS]]
    yield text_table(title, ("tensor", "how much"), (), rows)
    if len(differences) > _MOST_ROWS:
        yield f"and {len(differences) - _MOST_ROWS:,} more: --json has all of them"


def _facts(title: str, facts: Sequence[Row]) -> Table:
    return table(title, facts, "name:, a:A, b:B")


def _losses(losses: Sequence[Row]) -> Table:
    def cells(loss: Row) -> tuple[str, ...]:
        both = ("not finite" if value is None else f"{value:.9g}" for value in (loss.a, loss.b))
        return str(loss.step), *both, "-" if loss.relative is None else f"{loss.relative:.1e}"

    return text_table("losses", (), ("step", "A", "B", "relative difference"), map(cells, losses))


_MOST_SHOWN = 6
_NOT_BY_BIT = "not comparable bit by bit: {}; "
_COMPARED_APART = ("training.seed", "training.batch_size")  # deciding facts themselves, or part of the PEF

_Line: TypeAlias = tuple[int, int, int, StepDigests]  # step, replica and side (0 is A)


class _Pair(NamedTuple):
    """The digests of one tensor in both runs. `begins`: of the state before the first step of one of them."""

    step: int
    replica: int
    a: ValueDigest
    b: ValueDigest
    begins: bool


class _RunsComparison:
    """Steps are added in order; then `result` has what was found. Tensors are matched by name, in the order in which
    the first run computed them; at equal positions the lowest replica comes first."""

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
        for replica, of_replica in groupby(lines, key=itemgetter(1)):
            sides = {side: digests for _, _, side, digests in of_replica}
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
                    self.equal_before, self.last_equal = self.equal_before + 1, pair
                continue
            self.by_step[step] += 1
            if last is not None and (last.step, last.what, last.name, last.micro_step) == (step, *pair.a[:3]):
                self.differences[-1] = last.model_copy(update={"replicas": (*last.replicas, pair.replica)})
            elif len(self.differences) < _MOST_SHOWN:
                self.differences.append(self._difference(pair))

    def _difference(self, pair: _Pair) -> Row:
        a, b = pair.a, pair.b
        title = None if a.section is None else self.titles.get(a.section, str(a.section))
        return Row(
            step=pair.step,
            replicas=(pair.replica,),
            **{"micro_step": a.micro_step, "section": a.section, "section_title": title, "what": a.what},
            **{"name": a.name, "norm_a": a.norm, "norm_b": b.norm},
            relative_norm_difference=_relative_difference(a.norm, b.norm),
            **{"not_finite_a": a.not_finite, "not_finite_b": b.not_finite, "begins": pair.begins},
        )

    def result(self) -> Row:
        """`first`: the first difference; `not_comparable`: facts that explain other bits, the most important first."""
        a, b = self.sides
        facts = differing_facts(_deciding_facts(a.run), _deciding_facts(b.run))
        whole = a.replicas == b.replicas and self.ends[0] == self.ends[1] and not any(self.only_in.values())
        first = self.differences[0] if self.differences else None
        if first is not None:
            at = f"{'' if first.begins else 'at '}{place(first)}; {digest_difference(first)}"
            verdict = f"{_facts_text(_NOT_BY_BIT, facts)}they first differ {at}"
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
                yield f"only {name} has {_named('replica', alone)}"
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
                yield line.step, replica, side, line

    comparison = _RunsComparison(a, b)
    sides = product(comparison.replicas, enumerate((a, b)))
    recorded = [lines_of(recording, replica, side) for replica, (side, recording) in sides]
    for step, lines in groupby(merge(*recorded, key=itemgetter(0, 1, 2)), key=itemgetter(0)):
        comparison.add_step(step, lines)
    return comparison.result()


def _deciding_facts(run: RecordedRun | SummaryRecord) -> Mapping[str, object]:
    # The row "engine" shows --engine.
    exempt = "; ".join(reason for reason in run.exempt_from_exactness if not reason.startswith("--engine"))
    pef, cpu, more = run.pef_digest[:12], None, {}
    if isinstance(run, RecordedRun):
        pef, cpu = f"{run.pef} {pef}", run.cpu
    else:
        more = {"batch size": run.batch_size, "accumulation steps": run.accumulation_steps}
    facts = {"threads": run.threads, "engine": run.engine, "torch": run.torch, "CPU": cpu, "exempt": exempt or None}
    return {**facts, "world size": run.world_size, "seed": run.seed, "PEF": pef, **more}


def _facts_text(sentence: str, facts: Sequence[Row]) -> str:
    """`sentence` with the facts; empty without any."""

    def text(fact: Row) -> str:
        if fact.a == NOTHING:
            return f"{fact.name} {fact.b} in B alone"
        return f"{fact.name} {fact.a} in A alone" if fact.b == NOTHING else f"{fact.name} {fact.a} and {fact.b}"

    return sentence.format(", ".join(map(text, facts))) if facts else ""


def _relative_difference(a: float | None, b: float | None) -> float | None:
    """Relative to the larger number."""
    if a is None or b is None:
        return None
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def _differing_losses(losses: Sequence[tuple[int, float | None, float | None]]) -> list[Row]:
    """The first step whose losses differ, then steps at doubling distances, and the last."""
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
        verdict = f"{_facts_text(_NOT_BY_BIT, facts)}they first differ at {differ}"
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

    alike = a.summary is not None and b.summary is not None and a.summary.steps == b.summary.steps

    def results(records: RunRecords) -> dict[str, object]:
        pairs = product(records.evaluations, ("loss", "accuracy", "samples"))
        found = {f"evaluation after step {line.step}, {name}": getattr(line, name) for line, name in pairs}
        names = ("weights_sha256", "state_sha256") if alike else ()
        return found | {name: getattr(records.summary, name) for name in names}

    ours, theirs = results(a), results(b)
    return [{name: of_run[name] for name in ours if name in theirs} for of_run in (ours, theirs)]


def _metrics_notes(steps: tuple[list[int], list[int]], summaries: Sequence[SummaryRecord | None]) -> Iterator[str]:
    for name, mine, summary in zip("AB", steps, summaries, strict=True):
        if all(steps) and steps[0][-1] != steps[1][-1]:
            yield f"{name} ends after step {mine[-1]}"
        if summary is None:
            yield f"{name} has no summary: that run failed or is still running; its threads and engine are unknown"
    yield "times are not compared; `run --record-digests` finds the first tensor in which two runs differ"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
