"""What `sambasim compare` finds, as rows, text and tables: of metrics here, of runs in `recordings`, of files in
`tensors`, of PEFs in `commands/difference`."""

import math
from collections.abc import Iterator, Mapping, Sequence

from sambasim.records.digests import RecordedRun
from sambasim.records.metrics import EvaluationRecord, RunRecords, StepRecord, SummaryRecord
from sambasim.report.tables import Row, Table, table, text_table
from sambasim.units import counted, numbered

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
    replicas = numbered("replica", difference.replicas)
    return f"{when}, {replicas}{micro_step}{where}: {difference.what} {difference.name}"


def digest_difference(difference: Row) -> str:
    relative = difference.relative_norm_difference
    if relative is None:
        counts = (difference.not_finite_a, difference.not_finite_b)
        return "elements not finite: {} in A, {} in B".format(*(count or "none" for count in counts))
    if relative < 1e-15:
        return "same norm to 15 digits"
    norms = dict.fromkeys(f"{norm:.9g}" for norm in (difference.norm_a, difference.norm_b))
    return f"{numbered('norm', norms)}, {relative:.1e} apart"


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


def deciding_facts(run: RecordedRun | SummaryRecord) -> Mapping[str, object]:
    # The row "engine" shows --engine.
    exempt = "; ".join(reason for reason in run.exempt_from_exactness if not reason.startswith("--engine"))
    pef, cpu, more = run.pef_digest[:12], None, {}
    if isinstance(run, RecordedRun):
        pef, cpu = f"{run.pef} {pef}", run.cpu
    else:
        more = {"batch size": run.batch_size, "accumulation steps": run.accumulation_steps}
    facts = {"threads": run.threads, "engine": run.engine, "torch": run.torch, "CPU": cpu, "exempt": exempt or None}
    return {**facts, "data": run.data or None, "world size": run.world_size, "seed": run.seed, "PEF": pef, **more}


def verdict_of(first: str | None, equal: str | None, common: str, facts: Sequence[Row]) -> str:
    """Of two runs: where they `first` differ, or how far they are `equal`, or that they have no `common` step; with
    `facts` that explain other bits."""

    def text(fact: Row) -> str:
        if fact.a == NOTHING:
            return f"{fact.name} {fact.b} in B alone"
        return f"{fact.name} {fact.a} in A alone" if fact.b == NOTHING else f"{fact.name} {fact.a} and {fact.b}"

    explained = ", ".join(map(text, facts))
    if first is not None:
        return f"{f'not comparable bit by bit: {explained}; ' if facts else ''}they first differ {first}"
    if equal is not None:
        return f"equal{equal}{f', though {explained}' if facts else ''}"
    return f"nothing to compare: they have no {common} in common"


def relative_difference(a: float | None, b: float | None) -> float | None:
    """Relative to the larger number."""
    if a is None or b is None:
        return None
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def differing_losses(losses: Sequence[tuple[int, float | None, float | None]]) -> list[Row]:
    """The first step whose losses differ, then steps at doubling distances, and the last."""
    first = next((index for index, (_, a, b) in enumerate(losses) if a != b), None)
    if first is None:
        return []
    last, distance, chosen = len(losses) - 1, 1, [first]
    while first + distance < last:
        chosen.append(first + distance)
        distance *= 2
    rows = [losses[index] for index in dict.fromkeys([*chosen, last])]
    return [Row(step=step, a=a, b=b, relative=relative_difference(a, b)) for step, a, b in rows]


def has_all(first: float, last: float, end: float, asked: range | None) -> bool:
    """Whether steps `first` to `last` are all up to step `end`, and all that are `asked`. Without that, a run may begin
    with any step, as a resumed one does."""
    return last >= end and (asked is None or first <= asked.start)


def compare_metrics(a: tuple[str, RunRecords], b: tuple[str, RunRecords], asked: range | None = None) -> Row:
    """Compare two runs, or only the steps that are `asked`."""
    runs = [a[1], b[1]]
    kept = runs if asked is None else [_only(asked, records) for records in runs]
    ours, theirs = ({line.step: line for line in records.steps} for records in kept)
    common = [step for step in ours if step in theirs]
    told = [{step: _numbers(run[step], "loss", "lr", "grad_norm") for step in common} for run in (ours, theirs)]
    names = ((step, name) for step in common for name in told[0][step] | told[1][step])
    differences = (_step_difference(step, name, *(run[step].get(name) for run in told)) for step, name in names)
    first = next(filter(None, differences), None)
    summaries = [records.summary for records in runs]
    facts = differing_facts(*map(deciding_facts, filter(None, summaries))) if all(summaries) else []
    evaluated = [{line.step for line in records.evaluations} for records in kept]
    results = differing_facts(*_results(*kept))
    differ = first or next((f"{fact.name}: {fact.a} and {fact.b}" for fact in results), None)
    alike = ours.keys() == theirs.keys() and evaluated[0] == evaluated[1]
    whole = alike and all(_is_whole(records, asked) for records in runs)
    far = "" if whole else ", as far as both go"
    also = f", {counted(len(evaluated[0] & evaluated[1]), 'evaluation')}" if any(evaluated) else ""
    losses_of = f": losses of {counted(len(common), 'step')}{also}{far}" if common else None
    verdict = verdict_of(differ and f"at {differ}", losses_of, "step", facts)
    equal, notes = differ is None and whole and bool(ours), list(_metrics_notes(runs, kept, asked))
    losses = differing_losses([(step, _finite(ours[step].loss), _finite(theirs[step].loss)) for step in common])
    found = {"not_comparable": facts, "steps": len(common), "first": first, "losses": losses, "results": results}
    return Row(kind="metrics", a=a[0], b=b[0], equal=equal, verdict=verdict, **found, notes=notes)


def _only(asked: range, records: RunRecords) -> RunRecords:
    summary = records.summary
    steps = tuple(line for line in records.steps if line.step in asked)
    evaluations = tuple(line for line in records.evaluations if line.step in asked)
    return RunRecords(steps, evaluations, summary if summary is not None and summary.steps in asked else None)


def _is_whole(records: RunRecords, asked: range | None) -> bool:
    end = math.inf if records.summary is None else records.summary.steps
    end = end if asked is None else min(end, asked[-1])
    return bool(records.steps) and has_all(records.steps[0].step, records.steps[-1].step, end, asked)


def _numbers(line: StepRecord | EvaluationRecord, *names: str) -> dict[str, float | None]:
    return {name: getattr(line, name) for name in names} | {f"logged {name}": one for name, one in line.logged.items()}


def _step_difference(step: int, name: str, a: float | None, b: float | None) -> str | None:
    if repr(a) == repr(b):  # NaNs are equal, and -0.0 differs from 0.0
        return None
    relative = relative_difference(_finite(a), _finite(b))
    much = "" if relative is None else f", {relative:.1e} apart"
    return f"step {step}: {name} {a!r} and {b!r}{much}"


def _results(a: RunRecords, b: RunRecords) -> list[dict[str, object]]:
    """What both runs have: their evaluations, and their digests after equally many steps."""

    alike = a.summary is not None and b.summary is not None and a.summary.steps == b.summary.steps

    def results(records: RunRecords) -> dict[str, object]:
        found: dict[str, object] = {
            f"evaluation after step {line.step}, {name}": value
            for line in records.evaluations
            for name, value in (line.numbers | {"samples": line.samples}).items()
        }
        names = ("weights_sha256", "state_sha256") if alike else ()
        return found | {name: getattr(records.summary, name) for name in names}

    ours, theirs = results(a), results(b)
    return [{name: of_run[name] for name in ours if name in theirs} for of_run in (ours, theirs)]


def _metrics_notes(runs: Sequence[RunRecords], kept: Sequence[RunRecords], asked: range | None) -> Iterator[str]:
    steps = [[line.step for line in records.steps] for records in kept]
    evaluated = [[line.step for line in records.evaluations] for records in kept]
    first = asked.start if asked is not None else min((of_run[0] for of_run in steps if of_run), default=0)
    for name, mine, (ours, theirs), run in zip("AB", steps, (evaluated, evaluated[::-1]), runs, strict=True):
        if mine and mine[0] > first:
            yield f"{name} begins at step {mine[0]}"
        if all(steps) and steps[0][-1] != steps[1][-1]:
            yield f"{name} ends after step {mine[-1]}"
        if alone := [step for step in ours if step not in theirs]:
            yield f"only {name} has an evaluation after {numbered('step', alone)}"
        if run.summary is None:
            yield f"{name} has no summary: that run failed or is still running; its threads and engine are unknown"
    yield "times are not compared; `run --record-digests` finds the first tensor in which two runs differ"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
