"""The results of `sambasim compare` as text and tables. `runs` and `tensors` make them, as rows."""

from collections.abc import Iterator, Mapping, Sequence

from sambasim.errors import printable
from sambasim.report.tables import Row, Table, table, text_table
from sambasim.units import counted

_SAME_NORM = 1e-15
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
    replicas = f"{plural('replica', difference.replicas)} {', '.join(map(str, difference.replicas))}"
    return f"{when}, {replicas}{micro_step}{where}: {difference.what} {difference.name}"


def plural(noun: str, things: Sequence[object]) -> str:
    return noun if len(things) == 1 else f"{noun}s"


def digest_difference(difference: Row) -> str:
    relative = difference.relative_norm_difference
    if relative is None:
        counts = (difference.not_finite_a, difference.not_finite_b)
        return "elements not finite: {} in A, {} in B".format(*(count or "none" for count in counts))
    if relative < _SAME_NORM:
        return "same norm to 15 digits"
    norms = list(dict.fromkeys(f"{norm:.9g}" for norm in (difference.norm_a, difference.norm_b)))
    return f"{plural('norm', norms)} {' and '.join(norms)}, {relative:.1e} apart"


def tensor_difference(difference: Row) -> str:
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


def differing_facts(a: Mapping[str, object], b: Mapping[str, object]) -> list[Row]:
    """The items that differ, in the order of `a`, then those that only `b` has."""

    def text(value: object) -> str:
        return NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    names = (name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name))
    return [Row(name=name, a=text(a.get(name)), b=text(b.get(name))) for name in names]


def comparison(compared: Row) -> Iterator[str | Table]:
    """The verdict, and text and tables of what differs."""
    for part in (compared.verdict, *_parts(compared)):
        if isinstance(part, str):
            yield printable(part)
        elif part.rows:
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
            yield from map("note: {}".format, compared.notes)
        case "metrics":
            yield _facts("different bits are expected", compared.not_comparable)
            yield _losses(compared.losses)
            yield _facts("results", compared.results)
            yield from map("note: {}".format, compared.notes)
        case "pefs":
            yield _facts("options", compared.options)
            yield from (*compared.symbols[:_MOST_ROWS], *compared.graphs)
            if len(compared.symbols) > _MOST_ROWS:
                yield f"and {len(compared.symbols) - _MOST_ROWS:,} more symbols"
            yield from _tensors("weights that differ", compared.weights)
        case _:
            yield _facts("other facts", compared.facts)
            yield from _tensors("tensors that differ", compared.differences)


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
