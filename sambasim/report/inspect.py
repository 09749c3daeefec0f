"""The tables of `sambasim inspect`."""

import json
from collections.abc import Iterable, Mapping

from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sambasim.report.contents import Contents, GraphFacts, SectionFacts
from sambasim.report.output import add_row, plain_table
from sambasim.units import format_bytes, format_count

_MOST_SYMBOLS = 40
_MOST_SOURCES = 3


def inspection(facts: Contents, *, everything: bool) -> RenderableType:
    """Summary, sections, operators, sizes and groups; with `everything`, also symbols, runtime arguments and
    options."""
    tables = [summary_table(facts)]
    for graph in facts.graphs:
        tables += [sections_table(graph), operators_table(graph)]
    tables.append(sizes_table(facts))
    if facts.groups:
        tables.append(groups_table(facts))
    if not everything:
        return Group(*tables, Text("--all shows symbols, runtime arguments and options; --graph the operators"))
    tables.append(symbols_table(facts))
    if facts.runtime_arguments:
        tables.append(runtime_arguments_table(facts))
    named = (
        ("compile options", facts.compile_options),
        ("data source", facts.data_source),
        ("training defaults", facts.training_defaults),
        ("metadata", facts.metadata),
    )
    tables += [options_table(title, values) for title, values in named if values]
    return Group(*tables)


def summary_table(facts: Contents) -> Table:
    """What the PEF contains, for how many replicas, and its digests."""
    replicas = f"{facts.world_size} or more, data parallel" if facts.data_parallel else "1"
    what = "training step and evaluation" if facts.training else "inference"
    rows = [
        ("PEF", facts.pef),
        ("format", f"{facts.format_version}, written by {facts.writer}"),
        ("holds", what),
        ("replicas", replicas),
        ("batch size", f"{facts.batch_size} for each replica"),
        ("file", format_bytes(facts.file_bytes)),
        ("device memory", f"{format_bytes(facts.device_bytes)} for each replica"),
        ("digest", facts.digest),
        ("weights sha256", facts.weights_sha256),
    ]
    return _pairs(facts.name, rows)


def sections_table(graph: GraphFacts) -> Table:
    """Sections in the order of execution, with the bytes of values that enter and leave them."""
    table = plain_table(
        f"{graph.name}: sections ({len(graph.sections)})", ["section", "kind", "name"], ["operators", "in", "out"]
    )
    for section in graph.sections:
        _add_section(table, section)
    return table


def section_table(graph: GraphFacts, section: SectionFacts) -> Table:
    """One section; `sambasim inspect` prints its nodes below."""
    table = plain_table(
        f"{graph.name}: section {section.index}", ["section", "kind", "name"], ["operators", "in", "out"]
    )
    _add_section(table, section)
    return table


def operators_table(graph: GraphFacts) -> Table:
    """Operators by kind, and the source lines that they come from."""
    table = plain_table(f"{graph.name}: operators ({graph.nodes})", ["kind", "operator"], ["count"])
    table.add_column("source lines", overflow="fold")
    shown = ""
    for row in graph.operators:
        kind = "" if row.kind == shown else row.kind
        shown = row.kind
        add_row(table, kind, row.operator, str(row.count), _sources(row.sources))
    return table


def sizes_table(facts: Contents) -> Table:
    """Sizes by kind of symbol."""
    table = plain_table("sizes", ["kind"], ["symbols", "elements", "bytes"])
    for row in facts.sizes:
        add_row(table, row.kind, str(row.symbols), format_count(row.elements), format_bytes(row.size_bytes))
    return table


def symbols_table(facts: Contents) -> Table:
    """Symbols with their offsets in device memory; only the first of many."""
    table = plain_table(f"symbols ({len(facts.symbols)})", ["symbol", "kind", "type"], ["offset", "bytes"])
    for row in facts.symbols[:_MOST_SYMBOLS]:
        type_ = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
        offset = "" if row.offset is None else str(row.offset)
        add_row(table, row.name, row.kind, type_, offset, format_bytes(row.size_bytes))
    if (hidden := len(facts.symbols) - _MOST_SYMBOLS) > 0:
        table.caption = f"and {hidden} more; --json lists all of them"
    return table


def groups_table(facts: Contents) -> Table:
    """Parameter groups, and for data parallelism the symbols that hold their gradients."""
    table = plain_table("parameter groups", ["group", "optimizer", "dtype"], ["parameters", "elements", "bytes"])
    table.add_column("gradients reduced as", overflow="fold")
    for row in facts.groups:
        size = format_bytes(row.size_bytes)
        wrapper = row.gradient_symbol or "not reduced"
        add_row(
            table, row.name, row.optimizer, row.dtype, str(row.parameters), format_count(row.elements), size, wrapper
        )
    return table


def runtime_arguments_table(facts: Contents) -> Table:
    """Arguments that a run may set without compiling again."""
    table = plain_table("runtime arguments", ["argument"], ["default"])
    table.add_column("meaning", overflow="fold")
    for row in facts.runtime_arguments:
        add_row(table, row.name, str(row.default), row.meaning)
    return table


def options_table(title: str, values: Mapping[str, JsonValue]) -> Table:
    """A JSON object, key by key; nested values are shown as JSON."""
    rows = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in sorted(values.items()))
    return _pairs(title, rows)


def _add_section(table: Table, section: SectionFacts) -> None:
    sizes = (format_bytes(section.in_bytes), format_bytes(section.out_bytes))
    add_row(table, str(section.index), section.kind, section.name, str(section.operators), *sizes)


def _sources(sources: tuple[str, ...]) -> str:
    more = f" and {len(sources) - _MOST_SOURCES} more" if len(sources) > _MOST_SOURCES else ""
    return ", ".join(sources[:_MOST_SOURCES]) + more


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = plain_table(title, ["", ""], [])
    table.show_header = False
    for key, value in rows:
        add_row(table, key, value)
    return table
