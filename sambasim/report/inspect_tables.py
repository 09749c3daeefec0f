"""The tables of `sambasim inspect`."""

import json
from collections.abc import Iterable, Mapping, Sequence

from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sambasim.bounded import printable
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR
from sambasim.ir.types import SymbolKind
from sambasim.report.inspect import Contents, GraphFacts, SectionFacts
from sambasim.report.output import add_row, plain_table
from sambasim.report.summaries import chips_in_words
from sambasim.units import format_bytes, format_count

_MOST_SYMBOLS = 40
_MOST_SOURCES = 3
_MOST_EFFECTS = 4
_LONGEST_SYMBOL = 32
_SHOWN = 16
"""Digits of a digest; `verify` and --json have all 64, which do not fit in a table."""


def inspection(facts: Contents, *, everything: bool) -> RenderableType:
    tables = [summary_table(facts), *([stages_table(facts)] if facts.stages else [])]
    for graph in facts.graphs:
        tables += [sections_table(graph), operators_table(graph)]
        if graph.gathered:
            tables.append(gathered_table(graph))
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


def _zero_rows(facts: Contents) -> list[tuple[str, str]]:
    if not facts.data_parallel or facts.zero == 0:
        return []
    each = ", ".join(
        f"{format_bytes(one.kept_bytes)} of {format_bytes(one.size_bytes)} {one.kind}" for one in facts.kept
    )
    fewest = next(axis.size for axis in facts.mesh if axis.name == DATA_PARALLEL)
    if fewest == 1:
        cut = ", ".join(f"1/N of {format_bytes(one.size_bytes)} {one.kind}" for one in facts.kept[-facts.zero :])
        return [(f"ZeRO {facts.zero}", f"each of N replicas keeps {cut}")]
    return [(f"ZeRO {facts.zero}", f"each of {fewest} keeps {each}")]


def summary_table(facts: Contents) -> Table:
    at_run_time = any(axis.at_run_time for axis in facts.mesh)
    replicas = f"{facts.world_size} or more, data parallel" if at_run_time else "1"
    of_several = any(axis.name != DATA_PARALLEL or axis.chips > 1 for axis in facts.mesh)
    holder = "rank" if of_several else "replica"
    chips = [("chips a replica", chips_in_words(one.chips, facts.batch_size)) for one in facts.mesh if one.chips > 1]
    what = "training step and evaluation" if facts.training else "inference"
    rows = [
        ("PEF", facts.pef),
        ("format", f"{facts.format_version}, written by {facts.writer}"),
        ("holds", what),
        ("replicas", replicas),
        *chips,
        *_ranks_rows(facts),
        ("batch size", f"{facts.batch_size} for each replica"),
        ("file", format_bytes(facts.file_bytes)),
        ("device memory", f"{format_bytes(facts.device_bytes)} for each {holder}"),
        *_zero_rows(facts),
        ("checked", "no" if facts.checked is None else str(facts.checked)),
        *((" by rounding", str(one)) for one in (facts.checked.exceptions if facts.checked else ())),
        ("digest", f"{facts.digest[:_SHOWN]}…"),
        ("weights sha256", f"{facts.weights_sha256[:_SHOWN]}…"),
    ]
    return _pairs(facts.name, rows)


def _ranks_rows(facts: Contents) -> list[tuple[str, str]]:
    """What the ranks of a replica hold and send, if it has several."""
    of_stages = [stage.parameter_bytes for stage in facts.stages]
    held = [one.size_bytes for one in facts.sizes if one.kind == SymbolKind.PARAMETER.value]
    own, at_most = max(of_stages or held, default=0), " at most" * bool(of_stages)
    one_pass = "micro-batch" if of_stages else "pass"
    rows = [
        (
            f"axis {axis.name}",
            f"{axis.size} ranks, each with {format_bytes(own)} of {format_bytes(facts.parameter_bytes)} "
            f"parameters{at_most}; each receives {format_bytes(axis.received_bytes)} a {one_pass}{at_most}",
        )
        for axis in facts.mesh
        if axis.name != DATA_PARALLEL
    ]
    parameters = [one for one in facts.symbols if one.kind == SymbolKind.PARAMETER.value]
    whole = sorted((one for one in parameters if one.shape == one.whole_shape), key=lambda one: -one.size_bytes)
    if whole and any(axis.name == TENSOR for axis in facts.mesh):
        names = _first([(*one.torch_names, one.name)[0] for one in whole], _MOST_SOURCES)
        size = format_bytes(sum(one.size_bytes for one in whole))
        rows.append(("whole along tp", f"{len(whole)} of {len(parameters)} parameters, {size}: {names}"))
    return rows


def stages_table(facts: Contents) -> RenderableType:
    table = plain_table(
        "pipeline",
        ["rank", "stages"],
        ["operators", "parameters", "gradients and states", "sends a micro-batch"],
    )
    for one in facts.stages:
        stages = ", ".join(map(str, one.stages))
        sizes = map(format_bytes, (one.parameter_bytes, one.training_bytes, one.sent_bytes))
        add_row(table, str(one.rank), stages, str(one.operators), *sizes)
    tied = [
        f"rank {one.rank} updates {name}, whose gradient rank {source} sends once a step\n"
        for one in facts.stages
        for name, source in one.tied.items()
    ]
    return Group(table, Text(printable("".join(tied)))) if tied else table


def sections_table(graph: GraphFacts) -> Table:
    return _sections(f"{graph.name}: sections ({len(graph.sections)})", graph.sections)


def section_detail(graph: GraphFacts, section: SectionFacts) -> RenderableType:
    table = _sections(f"{graph.name}: section {section.index}", [section])
    effects = f"reads   {_first(section.reads, _MOST_EFFECTS)}\nwrites  {_first(section.writes, _MOST_EFFECTS)}"
    return Group(table, Text(printable(effects)))


def _sections(title: str, sections: Sequence[SectionFacts]) -> Table:
    table = plain_table(title, ["section", "kind", "name"], ["operators", "in", "out"])
    for section in sections:
        sizes = (format_bytes(section.in_bytes), format_bytes(section.out_bytes))
        add_row(table, str(section.index), section.kind, section.name, str(section.operators), *sizes)
    return table


def _first(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def operators_table(graph: GraphFacts) -> Table:
    table = plain_table(f"{graph.name}: operators ({graph.nodes})", ["kind", "operator"], ["count"])
    table.add_column("source lines", overflow="fold")
    shown = ""
    for row in graph.operators:
        kind = "" if row.kind == shown else row.kind
        shown = row.kind
        add_row(table, kind, row.operator, str(row.count), _first(row.sources, _MOST_SOURCES))
    return table


def gathered_table(graph: GraphFacts) -> Table:
    table = plain_table(
        f"{graph.name}: computed whole, of gathered parts", ["operator", "axis"], ["values", "received"]
    )
    table.add_column("modules", overflow="fold")
    for row in graph.gathered:
        received, modules = format_bytes(row.received_bytes), _first(row.modules, _MOST_SOURCES)
        add_row(table, row.operator, row.axis, str(row.values), received, modules)
    return table


def sizes_table(facts: Contents) -> Table:
    table = plain_table("sizes", ["kind"], ["symbols", "elements", "bytes"])
    for row in facts.sizes:
        add_row(table, row.kind, str(row.symbols), format_count(row.elements), format_bytes(row.size_bytes))
    return table


def symbols_table(facts: Contents) -> Table:
    table = plain_table(f"symbols ({len(facts.symbols)})", ["symbol", "kind", "type"], ["offset", "bytes"])
    for row in facts.symbols[:_MOST_SYMBOLS]:
        type_ = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
        offset = "" if row.offset is None else str(row.offset)
        add_row(table, row.name, row.kind, type_, offset, format_bytes(row.size_bytes))
    if (hidden := len(facts.symbols) - _MOST_SYMBOLS) > 0:
        table.caption = f"and {hidden} more; --json lists all of them"
    return table


def groups_table(facts: Contents) -> Table:
    table = plain_table("parameter groups", ["group", "optimizer", "dtype"], ["parameters", "elements", "bytes"])
    table.add_column("gradients reduced as", overflow="fold")
    for row in facts.groups:
        size = format_bytes(row.size_bytes)
        wrapper = row.gradient_symbol or "not reduced"
        if len(wrapper) > _LONGEST_SYMBOL:  # it ends in a hash; --all has all of it
            wrapper = f"{wrapper[:_LONGEST_SYMBOL]}…"
        add_row(
            table, row.name, row.optimizer, row.dtype, str(row.parameters), format_count(row.elements), size, wrapper
        )
    return table


def runtime_arguments_table(facts: Contents) -> Table:
    table = plain_table("runtime arguments", ["argument"], ["default"])
    table.add_column("meaning", overflow="fold")
    for row in facts.runtime_arguments:
        add_row(table, row.name, str(row.default), row.meaning)
    return table


def options_table(title: str, values: Mapping[str, JsonValue]) -> Table:
    rows = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in sorted(values.items()))
    return _pairs(title, rows)


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = plain_table(title, ["", ""], [])
    table.show_header = False
    for key, value in rows:
        add_row(table, key, value)
    return table
