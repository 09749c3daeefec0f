"""The results of `sambasim compare`: JSON records, and the same as text and tables. `runs` and `tensors` make them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.table import Table

from sambasim.bounded import printable
from sambasim.records import Record
from sambasim.records.digests import RecordedRun, What
from sambasim.records.metrics import SummaryRecord
from sambasim.report.output import add_row, plain_table


class Fact(Record):
    name: str
    a: str
    b: str


class DigestDifference(Record):
    """A tensor whose digests differ in `replicas`; the numbers are those of the first. `relative_norm_difference` is
    None if a norm is not finite."""

    step: int
    replicas: tuple[int, ...]
    micro_step: int | None
    section: int | None
    section_title: str | None
    what: What
    name: str
    norm_a: float | None
    norm_b: float | None
    relative_norm_difference: float | None
    not_finite_a: int
    not_finite_b: int
    begins: bool


class LossDifference(Record):
    step: int
    a: float | None
    b: float | None
    relative: float | None


class RunsCompared(Record):
    """Two recordings. `first` is the first tensor that differs, in the order in which a step computes them.
    `not_comparable` are facts that explain different bits, the most important first; `other_options` are all other
    options that differ."""

    kind: Literal["runs"] = "runs"
    a: str
    b: str
    equal: bool
    verdict: str
    not_comparable: tuple[Fact, ...]
    other_options: tuple[Fact, ...]
    steps: int
    replicas: tuple[int, ...]
    digests: int
    first: DigestDifference | None
    equal_before: int
    last_equal: str | None
    next_differences: tuple[DigestDifference, ...]
    differing_by_step: dict[int, int]
    losses: tuple[LossDifference, ...]
    only_in_a: int
    only_in_b: int
    notes: tuple[str, ...]


class TensorDifference(Record):
    """A tensor that differs in `differing` of its `elements`. The largest differences are over elements that are
    finite in both; `largest_ulps` is None for integers and float64."""

    name: str
    why: Literal["only in A", "only in B", "type", "values"]
    type_a: str | None
    type_b: str | None
    differing: int = 0
    elements: int = 0
    largest_absolute: float | None = None
    largest_relative: float | None = None
    largest_ulps: int | None = None
    differing_not_finite: int = 0


class TensorsCompared(Record):
    """Two sets of named tensors: weights or checkpoints. `differences` are in the order of A, then of B."""

    kind: Literal["weights", "checkpoints"]
    a: str
    b: str
    equal: bool
    verdict: str
    tensors: int
    facts: tuple[Fact, ...] = ()
    differences: tuple[TensorDifference, ...]


class PefsCompared(Record):
    kind: Literal["pefs"] = "pefs"
    a: str
    b: str
    equal: bool
    verdict: str
    options: tuple[Fact, ...]
    symbols: tuple[str, ...]
    graphs: tuple[str, ...]
    tensors: int
    weights: tuple[TensorDifference, ...]


class MetricsCompared(Record):
    kind: Literal["metrics"] = "metrics"
    a: str
    b: str
    equal: bool
    verdict: str
    not_comparable: tuple[Fact, ...]
    steps: int
    first: str | None
    losses: tuple[LossDifference, ...]
    results: tuple[Fact, ...]
    notes: tuple[str, ...]


Compared = RunsCompared | TensorsCompared | PefsCompared | MetricsCompared


_SAME_NORM = 1e-15
_SHORT_DIGEST = 12
_NOTHING = "-"
_COMPARED_APART = ("training.seed", "training.batch_size")
"""Options that are deciding facts themselves, or part of the PEF."""


def place(one: DigestDifference) -> str:
    """Where in a run a tensor is: `step 3, replica 0, section 2 FWD net__a: value net__relu`."""
    when = f"before step {one.step + 1}" if one.begins else f"step {one.step}"
    micro_step = f", micro-step {one.micro_step + 1}" if one.micro_step else ""
    if one.section_title is not None:
        where = f", section {one.section_title}"
    else:
        where = "" if one.begins else ", the batch" if one.what == "input" else ", after the update"
    replicas = f"replica{'' if len(one.replicas) == 1 else 's'} {', '.join(map(str, one.replicas))}"
    return f"{when}, {replicas}{micro_step}{where}: {one.what} {one.name}"


def digest_difference(one: DigestDifference) -> str:
    if one.relative_norm_difference is None:
        counts = (one.not_finite_a, one.not_finite_b)
        return "elements not finite: {} in A, {} in B".format(*(count or "none" for count in counts))
    if one.relative_norm_difference < _SAME_NORM:
        return "same norm to 15 digits"
    norms = list(dict.fromkeys(f"{norm:.9g}" for norm in (one.norm_a, one.norm_b)))
    return f"norm{'s' if len(norms) > 1 else ''} {' and '.join(norms)}, {one.relative_norm_difference:.1e} apart"


def tensor_difference(one: TensorDifference) -> str:
    if one.why in ("only in A", "only in B"):
        return f"{one.why}, {one.type_a or one.type_b}"
    if one.why == "type":
        return f"{one.type_a} in A, {one.type_b} in B"
    parts = [f"{one.differing:,} of {one.elements:,} elements"]
    if one.largest_absolute is not None:
        parts.append(f"by {one.largest_absolute:.3g} at most (relative {one.largest_relative:.2g})")
    if one.largest_ulps is not None:
        parts.append(f"{one.largest_ulps:,} ULP" + ("" if one.largest_ulps == 1 else "s"))
    if one.differing_not_finite:
        parts.append(f"{one.differing_not_finite:,} of them not finite")
    return ", ".join(parts)


def differing_facts(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[Fact, ...]:
    """The items that differ, in the order of `a`, then those that only `b` has."""
    names = dict.fromkeys((*a, *b))
    return tuple(
        Fact(name=name, a=_value_text(a, name), b=_value_text(b, name)) for name in names if a.get(name) != b.get(name)
    )


def deciding_facts(run: RecordedRun | SummaryRecord) -> Mapping[str, object]:
    """Facts that explain different bits, the most important first."""
    # The row "engine" shows --engine.
    exempt = (reason for reason in run.exempt_from_exactness if not reason.startswith("--engine"))
    pef = run.pef_digest[:_SHORT_DIGEST]
    facts = {
        "threads": run.threads,
        "engine": run.engine,
        "torch": run.torch,
        "CPU": None,
        "exempt": "; ".join(exempt) or None,
        "world size": run.world_size,
        "seed": run.seed,
        "PEF": pef,
    }
    if isinstance(run, RecordedRun):
        return facts | {"CPU": run.cpu, "PEF": f"{run.pef} {pef}"}
    return facts | {"batch size": run.batch_size, "accumulation steps": run.accumulation_steps}


def differing_options(a: RecordedRun, b: RecordedRun) -> tuple[Fact, ...]:
    return differing_facts(*({k: v for k, v in one.options.items() if k not in _COMPARED_APART} for one in (a, b)))


def facts_text(found: Sequence[Fact]) -> str:
    return ", ".join(_fact_text(one) for one in found)


def _fact_text(fact: Fact) -> str:
    if _NOTHING in (fact.a, fact.b):
        return f"{fact.name} {fact.b} in B alone" if fact.a == _NOTHING else f"{fact.name} {fact.a} in A alone"
    return f"{fact.name} {fact.a} and {fact.b}"


def _value_text(values: Mapping[str, object], name: str) -> str:
    value = values.get(name)
    return _NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


Losses = Sequence[tuple[int, float | None, float | None]]


def relative_difference(a: float | None, b: float | None) -> float | None:
    """The difference, relative to the larger number; None if one is None."""
    if a is None or b is None:
        return None
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def differing_losses(losses: Losses) -> tuple[LossDifference, ...]:
    """The first step whose losses differ, then steps at doubling distances, and the last. Empty if all are equal."""
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
    return tuple(LossDifference(step=step, a=a, b=b, relative=relative_difference(a, b)) for step, a, b in rows)


_MOST_ROWS = 12


def comparison(found: Compared) -> Iterator[str | Table]:
    yield printable(found.verdict)
    match found:
        case RunsCompared():
            yield from _runs_text(found)
        case MetricsCompared():
            yield from _facts_table("different bits are expected", found.not_comparable)
            yield from _losses_table(found.losses)
            yield from _facts_table("results", found.results)
            yield from _notes(found.notes)
        case PefsCompared():
            yield from _facts_table("options", found.options)
            yield from map(printable, (*found.symbols[:_MOST_ROWS], *found.graphs))
            if len(found.symbols) > _MOST_ROWS:
                yield f"and {len(found.symbols) - _MOST_ROWS:,} more symbols"
            yield from _tensors_table("weights that differ", found.weights)
        case TensorsCompared():
            yield from _facts_table("other facts", found.facts)
            yield from _tensors_table("tensors that differ", found.differences)


def _runs_text(found: RunsCompared) -> Iterator[str | Table]:
    if found.first is not None:
        last = f", the last of them {found.last_equal}" if found.last_equal else ""
        yield printable(f"before it: {found.equal_before:,} digests, all equal{last}")
    yield from _facts_table("different bits are expected", found.not_comparable)
    yield from _facts_table("other options that differ", found.other_options)
    then = [(place(one), digest_difference(one)) for one in found.next_differences]
    yield from _table("next differences", ("where", "how much"), then)
    if found.differing_by_step:
        counts = ", ".join(f"step {step}: {count:,}" for step, count in found.differing_by_step.items())
        yield f"digests that differ, of {found.digests:,}: {counts}"
    yield from _losses_table(found.losses)
    yield from _notes(found.notes)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    if rows:
        table = plain_table(title, columns, ())
        for row in rows:
            add_row(table, *row)
        yield table


def _tensors_table(title: str, apart: Sequence[TensorDifference]) -> Iterator[str | Table]:
    rows = [(one.name, tensor_difference(one)) for one in apart[:_MOST_ROWS]]
    yield from _table(title, ("tensor", "how much"), rows)
    if len(apart) > _MOST_ROWS:
        yield f"and {len(apart) - _MOST_ROWS:,} more: --json has all of them"


def _facts_table(title: str, facts: Sequence[Fact]) -> Iterator[Table]:
    yield from _table(title, ("", "A", "B"), [(one.name, one.a, one.b) for one in facts])


def _losses_table(rows: Sequence[LossDifference]) -> Iterator[Table]:
    if rows:
        table = plain_table("losses", (), ("step", "A", "B", "relative difference"))
        for one in rows:
            apart = "-" if one.relative is None else f"{one.relative:.1e}"
            add_row(table, str(one.step), _loss(one.a), _loss(one.b), apart)
        yield table


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    return (printable(f"note: {note}") for note in notes)
