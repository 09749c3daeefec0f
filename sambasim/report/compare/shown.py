"""A comparison for people: the answer in one line, and what it rests on."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from sambasim.report.compare import runs, tensors
from sambasim.report.compare.result import (
    Compared,
    Fact,
    LossApart,
    MetricsCompared,
    PefsCompared,
    RunsCompared,
    TensorApart,
    TensorsCompared,
)
from sambasim.report.tables import add_row, plain_table, printable

_MOST_ROWS = 12


def comparison(found: Compared) -> Iterator[str | Table]:
    """Lines and tables; the verdict is the first of them."""
    yield printable(found.verdict)
    if isinstance(found, RunsCompared):
        yield from _runs(found)
    elif isinstance(found, MetricsCompared):
        yield from _facts("what makes bits differ by right", found.not_comparable)
        yield from _losses(found.losses)
        yield from _facts("results", found.results)
        yield from _notes(found.notes)
    elif isinstance(found, PefsCompared):
        yield from _pefs(found)
    elif isinstance(found, TensorsCompared):
        yield from _facts("other facts", found.facts)
        yield from _tensors("tensors that differ", found.apart)


def _runs(found: RunsCompared) -> Iterator[str | Table]:
    if found.first is not None:
        last = f", the last of them {found.last_alike}" if found.last_alike else ""
        yield printable(f"before it: {found.alike_before:,} digests, all alike{last}")
    yield from _facts("what makes bits differ by right", found.not_comparable)
    yield from _facts("asked for otherwise", found.asked_otherwise)
    if found.then:
        table = plain_table("what differs next", ("where", "by how much"), ())
        for one in found.then:
            add_row(table, runs.place(one), runs.how_much(one))
        yield table
    if found.differing_by_step:
        counts = ", ".join(f"step {step}: {count:,}" for step, count in found.differing_by_step.items())
        yield f"digests that differ, of {found.digests:,}: {counts}"
    yield from _losses(found.losses)
    yield from _notes(found.notes)


def _pefs(found: PefsCompared) -> Iterator[str | Table]:
    yield from _facts("options", found.options)
    for line in (*found.symbols[:_MOST_ROWS], *found.graphs):
        yield printable(line)
    if len(found.symbols) > _MOST_ROWS:
        yield f"and {len(found.symbols) - _MOST_ROWS:,} more symbols"
    yield from _tensors("weights that differ", found.weights)


def _tensors(title: str, apart: Sequence[TensorApart]) -> Iterator[str | Table]:
    if not apart:
        return
    table = plain_table(title, ("tensor", "by how much"), ())
    for one in apart[:_MOST_ROWS]:
        add_row(table, one.name, tensors.told(one))
    yield table
    if len(apart) > _MOST_ROWS:
        yield f"and {len(apart) - _MOST_ROWS:,} more: --json has all of them"


def _facts(title: str, facts: Sequence[Fact]) -> Iterator[Table]:
    if facts:
        table = plain_table(title, ("", "A", "B"), ())
        for one in facts:
            add_row(table, one.name, one.a, one.b)
        yield table


def _losses(rows: Sequence[LossApart]) -> Iterator[str | Table]:
    if rows:
        table = plain_table("losses", (), ("step", "A", "B", "relative difference"))
        for one in rows:
            apart = "-" if one.relative is None else f"{one.relative:.1e}"
            add_row(table, str(one.step), _loss(one.a), _loss(one.b), apart)
        yield table


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield printable(f"note: {note}")
