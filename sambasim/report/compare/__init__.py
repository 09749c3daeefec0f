"""The results of `sambasim compare`: JSON records, and the same as text and tables. `runs` and `tensors` make them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from sambasim.bounded import printable
from sambasim.records import Record
from sambasim.records.digests import RecordedRun, What
from sambasim.records.metrics import SummaryRecord
from sambasim.report.tables import Table, table, text_table
from sambasim.units import counted


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


class Compared(Record):
    kind: str
    a: str
    b: str
    equal: bool
    verdict: str


class RunsCompared(Compared):
    """Two recordings. `first` is the first tensor that differs, in the order in which a step computes them.
    `not_comparable` are facts that explain different bits, the most important first; `other_options` are all other
    options that differ."""

    kind: Literal["runs"] = "runs"
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


class MetricsCompared(Compared):
    kind: Literal["metrics"] = "metrics"
    not_comparable: tuple[Fact, ...]
    steps: int
    first: str | None
    losses: tuple[LossDifference, ...]
    results: tuple[Fact, ...]
    notes: tuple[str, ...]


class TensorsCompared(Compared):
    """Two sets of named tensors: weights or checkpoints. `differences` are in the order of A, then of B."""

    kind: Literal["weights", "checkpoints"]
    tensors: int
    facts: tuple[Fact, ...] = ()
    differences: tuple[TensorDifference, ...]


class PefsCompared(Compared):
    kind: Literal["pefs"] = "pefs"
    options: tuple[Fact, ...]
    symbols: tuple[str, ...]
    graphs: tuple[str, ...]
    tensors: int
    weights: tuple[TensorDifference, ...]


_SAME_NORM = 1e-15
_SHORT_DIGEST = 12
_NOTHING = "-"
_MOST_ROWS = 12
_COMPARED_APART = ("training.seed", "training.batch_size")
"""Options that are deciding facts themselves, or part of the PEF."""


def place(difference: DigestDifference) -> str:
    """Where in a run a tensor is: `step 3, replica 0, section 2 FWD net__a: value net__relu`."""
    when = f"before step {difference.step + 1}" if difference.begins else f"step {difference.step}"
    micro_step = f", micro-step {difference.micro_step + 1}" if difference.micro_step else ""
    if difference.section_title is not None:
        where = f", section {difference.section_title}"
    else:
        where = "" if difference.begins else ", the batch" if difference.what == "input" else ", after the update"
    replicas = f"{plural('replica', difference.replicas)} {', '.join(map(str, difference.replicas))}"
    return f"{when}, {replicas}{micro_step}{where}: {difference.what} {difference.name}"


def plural(noun: str, things: Sequence[object]) -> str:
    return noun if len(things) == 1 else f"{noun}s"


def digest_difference(difference: DigestDifference) -> str:
    relative = difference.relative_norm_difference
    if relative is None:
        counts = (difference.not_finite_a, difference.not_finite_b)
        return "elements not finite: {} in A, {} in B".format(*(count or "none" for count in counts))
    if relative < _SAME_NORM:
        return "same norm to 15 digits"
    norms = list(dict.fromkeys(f"{norm:.9g}" for norm in (difference.norm_a, difference.norm_b)))
    return f"{plural('norm', norms)} {' and '.join(norms)}, {relative:.1e} apart"


def tensor_difference(difference: TensorDifference) -> str:
    if difference.why == "type":
        return f"{difference.type_a} in A, {difference.type_b} in B"
    if difference.why != "values":
        return f"{difference.why}, {difference.type_a or difference.type_b}"
    parts = [f"{difference.differing:,} of {difference.elements:,} elements"]
    if difference.largest_absolute is not None:
        relative = f"{difference.largest_relative:.2g}"
        parts.append(f"by {difference.largest_absolute:.3g} at most (relative {relative})")
    if difference.largest_ulps is not None:
        parts.append(counted(difference.largest_ulps, "ULP"))
    if difference.differing_not_finite:
        parts.append(f"{difference.differing_not_finite:,} of them not finite")
    return ", ".join(parts)


def differing_facts(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[Fact, ...]:
    """The items that differ, in the order of `a`, then those that only `b` has."""
    names = (name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name))
    return tuple(Fact(name=name, a=_value_text(a.get(name)), b=_value_text(b.get(name))) for name in names)


def _value_text(value: object) -> str:
    return _NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
    return differing_facts(*({k: v for k, v in run.options.items() if k not in _COMPARED_APART} for run in (a, b)))


def facts_text(facts: Sequence[Fact]) -> str:
    return ", ".join(map(_fact_text, facts))


def _fact_text(fact: Fact) -> str:
    if fact.a == _NOTHING:
        return f"{fact.name} {fact.b} in B alone"
    return f"{fact.name} {fact.a} in A alone" if fact.b == _NOTHING else f"{fact.name} {fact.a} and {fact.b}"


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
    last, distance, chosen = len(losses) - 1, 1, [first]
    while first + distance < last:
        chosen.append(first + distance)
        distance *= 2
    rows = [losses[index] for index in dict.fromkeys([*chosen, last])]
    return tuple(LossDifference(step=step, a=a, b=b, relative=relative_difference(a, b)) for step, a, b in rows)


def comparison(compared: Compared) -> Iterator[str | Table]:
    """The verdict, and text and tables of what differs."""
    yield printable(compared.verdict)
    for part in _parts(compared):
        if isinstance(part, str):
            yield printable(part)
        elif part.rows:
            yield part


def _parts(compared: Compared) -> Iterator[str | Table]:
    match compared:
        case RunsCompared():
            yield from _runs_parts(compared)
        case MetricsCompared():
            yield _facts("different bits are expected", compared.not_comparable)
            yield _losses(compared.losses)
            yield _facts("results", compared.results)
            yield from map("note: {}".format, compared.notes)
        case PefsCompared():
            yield _facts("options", compared.options)
            yield from (*compared.symbols[:_MOST_ROWS], *compared.graphs)
            if len(compared.symbols) > _MOST_ROWS:
                yield f"and {len(compared.symbols) - _MOST_ROWS:,} more symbols"
            yield from _tensors("weights that differ", compared.weights)
        case TensorsCompared():
            yield _facts("other facts", compared.facts)
            yield from _tensors("tensors that differ", compared.differences)


def _runs_parts(compared: RunsCompared) -> Iterator[str | Table]:
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
    yield from map("note: {}".format, compared.notes)


def _tensors(title: str, differences: Sequence[TensorDifference]) -> Iterator[str | Table]:
    rows = [(difference.name, tensor_difference(difference)) for difference in differences[:_MOST_ROWS]]
    yield text_table(title, ("tensor", "how much"), (), rows)
    if len(differences) > _MOST_ROWS:
        yield f"and {len(differences) - _MOST_ROWS:,} more: --json has all of them"


def _facts(title: str, facts: Sequence[Fact]) -> Table:
    return table(title, facts, "name:, a:A, b:B")


def _losses(losses: Sequence[LossDifference]) -> Table:
    def text(loss: float | None) -> str:
        return "not finite" if loss is None else f"{loss:.9g}"

    rows = [
        (str(row.step), text(row.a), text(row.b), "-" if row.relative is None else f"{row.relative:.1e}")
        for row in losses
    ]
    return text_table("losses", (), ("step", "A", "B", "relative difference"), rows)
