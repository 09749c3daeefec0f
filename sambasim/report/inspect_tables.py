"""The tables of `sambasim inspect`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.text import Text

from sambasim.bounded import printable
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR
from sambasim.ir.types import SymbolKind
from sambasim.report.inspect import Contents, GraphFacts, Row, SectionFacts
from sambasim.report.summaries import chips_in_words
from sambasim.report.tables import Table, table, text_table
from sambasim.units import format_bytes

_MOST_SYMBOLS = 40
_MOST_SOURCES = 3
_MOST_EFFECTS = 4
_LONGEST_SYMBOL = 32
_SHOWN = 16
"""Digits of a digest; `verify` and --json have all 64, which do not fit in a table."""


def inspection(facts: Contents, *, everything: bool) -> RenderableType:
    tables = [summary_table(facts), *([_stages(facts)] if facts.stages else [])]
    for graph in facts.graphs:
        tables += [_sections(f"{graph.name}: sections ({len(graph.sections)})", graph.sections), _operators(graph)]
        if graph.gathered:
            tables.append(_gathered(graph))
    tables.append(table("sizes", facts.sizes, "kind", "symbols, elements, size_bytes:bytes"))
    if facts.groups:
        tables.append(_groups(facts))
    if not everything:
        return Group(*tables, Text("--all shows symbols, runtime arguments and options; --graph the operators"))
    tables.append(_symbols(facts))
    if facts.runtime_arguments:
        tables.append(table("runtime arguments", facts.runtime_arguments, "name:argument", "default", "meaning"))
    tables += [
        options_table(title, values)
        for title, values in (
            ("compile options", facts.compile_options),
            ("data source", facts.data_source),
            ("training defaults", facts.training_defaults),
            ("metadata", facts.metadata),
        )
        if values
    ]
    return Group(*tables)


def summary_table(facts: Contents) -> Table:
    at_run_time = any(axis.at_run_time for axis in facts.mesh)
    of_several = any(axis.name != DATA_PARALLEL or axis.chips > 1 for axis in facts.mesh)
    rows = [
        ("PEF", facts.pef),
        ("format", f"{facts.format_version}, written by {facts.writer}"),
        ("holds", "training step and evaluation" if facts.training else "inference"),
        ("replicas", f"{facts.world_size} or more, data parallel" if at_run_time else "1"),
        *(("chips a replica", chips_in_words(axis.chips, facts.batch_size)) for axis in facts.mesh if axis.chips > 1),
        *_ranks_rows(facts),
        ("batch size", f"{facts.batch_size} for each replica"),
        ("file", format_bytes(facts.file_bytes)),
        ("device memory", f"{format_bytes(facts.device_bytes)} for each {'rank' if of_several else 'replica'}"),
        *_zero_rows(facts),
        ("checked", "no" if facts.checked is None else str(facts.checked)),
        *((" by rounding", str(tensor)) for tensor in (facts.checked.exceptions if facts.checked else ())),
        ("digest", f"{facts.digest[:_SHOWN]}…"),
        ("weights sha256", f"{facts.weights_sha256[:_SHOWN]}…"),
    ]
    return text_table(facts.name, ("", ""), (), rows)


def _ranks_rows(facts: Contents) -> list[tuple[str, str]]:
    """What the ranks of a replica hold and send, if it has several."""
    of_stages = [stage.parameter_bytes for stage in facts.stages]
    held = [size.size_bytes for size in facts.sizes if size.kind == SymbolKind.PARAMETER.value]
    of_rank, at_most = max(of_stages or held, default=0), " at most" * bool(of_stages)
    one_pass = "micro-batch" if of_stages else "pass"
    rows = [
        (
            f"axis {axis.name}",
            f"{axis.size} ranks, each with {format_bytes(of_rank)} of {format_bytes(facts.parameter_bytes)} "
            f"parameters{at_most}; each receives {format_bytes(axis.received_bytes)} a {one_pass}{at_most}",
        )
        for axis in facts.mesh
        if axis.name != DATA_PARALLEL
    ]
    parameters = [symbol for symbol in facts.symbols if symbol.kind == SymbolKind.PARAMETER.value]
    whole = [symbol for symbol in parameters if symbol.shape == symbol.whole_shape]
    if whole and any(axis.name == TENSOR for axis in facts.mesh):
        whole.sort(key=lambda symbol: -symbol.size_bytes)
        names = _first([(*symbol.torch_names, symbol.name)[0] for symbol in whole], _MOST_SOURCES)
        size = format_bytes(sum(symbol.size_bytes for symbol in whole))
        rows.append(("whole along tp", f"{len(whole)} of {len(parameters)} parameters, {size}: {names}"))
    return rows


def _zero_rows(facts: Contents) -> list[tuple[str, str]]:
    if not facts.data_parallel or facts.zero == 0:
        return []
    fewest = next(axis.size for axis in facts.mesh if axis.name == DATA_PARALLEL)
    if fewest == 1:
        cut = (f"1/N of {format_bytes(part.size_bytes)} {part.kind}" for part in facts.kept[-facts.zero :])
        return [(f"ZeRO {facts.zero}", f"each of N replicas keeps {', '.join(cut)}")]
    parts = (f"{format_bytes(part.kept_bytes)} of {format_bytes(part.size_bytes)} {part.kind}" for part in facts.kept)
    return [(f"ZeRO {facts.zero}", f"each of {fewest} keeps {', '.join(parts)}")]


def _stages(facts: Contents) -> RenderableType:
    columns = (
        "operators, parameter_bytes:parameters, training_bytes:gradients and states, sent_bytes:sends a micro-batch"
    )
    stages = table("pipeline", facts.stages, "rank, stages", columns)
    tied = [
        f"rank {stage.rank} updates {name}, whose gradient rank {source} sends once a step\n"
        for stage in facts.stages
        for name, source in stage.tied.items()
    ]
    return Group(stages, Text(printable("".join(tied)))) if tied else stages


def section_detail(graph: GraphFacts, section: SectionFacts) -> RenderableType:
    sections = _sections(f"{graph.name}: section {section.index}", [section])
    effects = f"reads   {_first(section.reads, _MOST_EFFECTS)}\nwrites  {_first(section.writes, _MOST_EFFECTS)}"
    return Group(sections, Text(printable(effects)))


def _sections(title: str, sections: Sequence[SectionFacts]) -> Table:
    return table(title, sections, "index:section, kind, name", "operators, in_bytes, out_bytes")


def _first(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _operators(graph: GraphFacts) -> Table:
    shown = set[str]()

    def row(operator: Row) -> Mapping[str, object]:
        kind = "" if operator.kind in shown else operator.kind  # operators are in the order of their kinds
        shown.add(operator.kind)
        return {**operator.model_dump(), "kind": kind, "sources": _first(operator.sources, _MOST_SOURCES)}

    title = f"{graph.name}: operators ({graph.nodes})"
    return table(title, map(row, graph.operators), "kind, operator", "count", "sources:source lines")


def _gathered(graph: GraphFacts) -> Table:
    rows = [{**row.model_dump(), "modules": _first(row.modules, _MOST_SOURCES)} for row in graph.gathered]
    title = f"{graph.name}: computed whole, of gathered parts"
    return table(title, rows, "operator, axis", "values, received_bytes", "modules")


def _symbols(facts: Contents) -> Table:
    rows = [
        {**symbol.model_dump(), "type": f"{symbol.dtype}[{', '.join(map(str, symbol.shape))}]"}
        for symbol in facts.symbols[:_MOST_SYMBOLS]
    ]
    title = f"symbols ({len(facts.symbols)})"
    symbols = table(title, rows, "name:symbol, kind, type", "offset, size_bytes:bytes")
    hidden = len(facts.symbols) - _MOST_SYMBOLS
    return replace(symbols, caption=f"and {hidden} more; --json lists all of them") if hidden > 0 else symbols


def _groups(facts: Contents) -> Table:
    def buffer(symbol: str | None) -> str:
        if symbol is None:
            return "not reduced"
        # it ends in a hash; --all has all of it
        return f"{symbol[:_LONGEST_SYMBOL]}…" if len(symbol) > _LONGEST_SYMBOL else symbol

    rows = [{**group.model_dump(), "gradient_symbol": buffer(group.gradient_symbol)} for group in facts.groups]
    numbers = "parameters, elements, size_bytes:bytes"
    words = "name:group, optimizer, dtype"
    return table("parameter groups", rows, words, numbers, "gradient_symbol:gradients reduced as")


def options_table(title: str, values: Mapping[str, JsonValue]) -> Table:
    rows = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in sorted(values.items())]
    return text_table(title, ("", ""), (), rows)
