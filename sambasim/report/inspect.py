"""What `sambasim inspect` says about a PEF, `compile -v` at its end, and a Pef in Python. Traffic: of what a section
reads and writes, each value counted once."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.text import Text

from sambasim.errors import printable
from sambasim.ir.dataflow import Gather, axis_of, gathers, pass_and_update, section_effects
from sambasim.ir.graph import Graph, Node
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.ranks import copied, ends_of, kept, of_ranks
from sambasim.ir.types import DTYPE_BYTES, Symbol, SymbolKind, cut
from sambasim.pef import PefDocument
from sambasim.report.tables import Row, Table, table, text_table
from sambasim.simulation.memory import least_memory
from sambasim.units import counted, first_of, format_bytes

_OPTIONS = ("compile_options", "data_source", "training_defaults", "metadata")


def contents(path: Path, document: PefDocument) -> Row:
    """`kept`: by one of the fewest replicas between steps, in a host sync; `chips`: ranks that share its batch.
    `graphs`: those of all graphs of a PEF of several; the rest is of the first."""
    program, symbols = document.program, document.program.symbols.values()
    slices = {group.name: cut(group.numel, program.world_size * program.chips)[0] for group in program.groups}
    return Row(
        pef=str(path),
        name=program.name,
        format_version=document.version,
        writer=document.writer,
        digest=document.digest,
        weights_sha256=document.weights_sha256,
        file_bytes=path.stat().st_size,
        device_bytes=program.device_bytes,
        batch_size=program.replica_batch_size,
        world_size=program.world_size,
        mesh=[Row(**asdict(axis), received_bytes=_received_bytes(program, axis.name)) for axis in program.mesh],
        stages=list(_stages(program)),
        parameter_bytes=sum(one.whole.size_bytes for one in symbols if one.kind is SymbolKind.PARAMETER),
        data_parallel=program.data_parallel,
        zero=program.zero,
        kept=[] if program.training is None else kept(program, slices),
        training=program.training is not None,
        loss=program.loss,
        graphs=[
            Row(
                name=name if document.has_several else graph.name,
                nodes=len(graph.nodes),
                inputs=graph.inputs,
                outputs=[output.symbol for output in graph.outputs],
                sections=list(section_facts(own.program, graph)),
                operators=list(_operators(graph.nodes)),
                gathered=list(_gathered(own.program, graph)),
            )
            for name, own in document.graphs.items()
            for graph in own.program.graphs
        ],
        sizes=list(sizes_of(symbols)),
        symbols=list(map(_symbol, symbols)),
        groups=list(_groups(program)),
        runtime_arguments=program.runtime_arguments,
        **{name: dict(getattr(document, name)) for name in _OPTIONS},
        checked=document.first.checked,
    )


def _received_bytes(program: Program, axis: str) -> int:
    """What a rank, the one with the most, receives along `axis` in a pass of the training step, or of the evaluation
    graph without one: of a collective, the operands of all other ranks."""

    def of_rank(rank: Program) -> int:
        graph, received = rank.leading, 0
        others = sum(each.size - 1 for each in rank.mesh if each.name == axis and not each.at_run_time)
        types = graph.types(rank.symbols)
        for node in (node for section in pass_and_update(graph)[0] for node in graph.section_nodes(section)):
            if axis_of(node) != axis or node.operator in ("comm.shard", "comm.send"):
                continue
            if node.operator == "comm.recv":
                received += types[node.results[0] or ""].size_bytes
            else:
                received += others * sum(types[name].size_bytes for name in node.reads)
        return received

    return max(map(of_rank, of_ranks(program)))


def _stages(program: Program) -> Iterator[Row]:
    """`sent_bytes`: of one micro-batch; `tied`: by parameter whose gradient another rank sends, that rank."""
    if program.schedule is None:
        return
    for rank, part in enumerate(of_ranks(program)):
        nodes, types = part.leading.nodes, part.leading.types(part.symbols)
        sent = [name for node in nodes if node.operator == "comm.send" for name in node.reads]
        parameter_of = {member.gradient: member.parameter for group in part.groups for member in group.members}
        copies = {copied(node): node for node in nodes}
        sizes = least_memory(part).sizes
        yield Row(
            **{"rank": rank, "stages": list(program.schedule.stages_of(rank)), "operators": len(nodes)},
            **{name: sizes[name] for name in ("parameters_bytes", "gradients_bytes", "states_bytes")},
            sent_bytes=sum(types[name].size_bytes for name in sent),
            tied={parameter_of[name]: ends_of(node)[0] for name, node in copies.items() if name in parameter_of},
        )


def section_facts(program: Program, graph: Graph) -> Iterator[Row]:
    """`reads` and `writes` name values, symbols and `group.region`."""
    types = dict(graph.types(program.symbols))
    for group in program.groups:
        types |= {f"{group.name}.{region}": group.region_type(region) for region in group.regions}

    def size_bytes(names: Iterable[str]) -> int:
        return sum(types[name].size_bytes for name in names)

    for section in graph.sections:
        reads, writes = section_effects(program, graph, section)
        names = {"index": section.index, "kind": section.kind.value, "name": section.name}
        sizes = {"in_bytes": size_bytes(reads), "out_bytes": size_bytes(writes)}
        values = {"reads": sorted(reads), "writes": sorted(writes)}
        yield Row(**names, operators=section.stop - section.start, **sizes, **values)


def _operators(nodes: Iterable[Node]) -> Iterator[Row]:
    of_operator: defaultdict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        of_operator[node.operator].append(node)
    counts = [(OPERATORS[operator].kind.value, -len(alike), operator) for operator, alike in of_operator.items()]
    for kind, count, operator in sorted(counts):
        sources = (node.source for node in of_operator[operator] if node.source is not None)
        lines = dict.fromkeys(f"{source.file}:{source.line}" for source in sources)
        yield Row(kind=kind, operator=operator, count=-count, sources=list(lines))


def _gathered(program: Program, graph: Graph) -> Iterator[Row]:
    """Whole values that an operator reads, of parts; `operator` may be `gradients` or `outputs`, which leave whole."""
    for axis in program.mesh:
        by_operator: defaultdict[str, list[Gather]] = defaultdict(list)
        for gather in gathers(graph, axis.name, axis.size):
            by_operator[gather.operator].append(gather)
        for operator, values in by_operator.items():
            modules = list(dict.fromkeys(value.module for value in values if value.module))
            sizes = {"values": len(values), "received_bytes": sum(value.received_bytes for value in values)}
            yield Row(axis=axis.name, operator=operator, **sizes, modules=modules)


def sizes_of(symbols: Collection[Symbol]) -> Iterator[Row]:
    """By kind."""
    for kind in SymbolKind:
        if types := [symbol.type for symbol in symbols if symbol.kind is kind]:
            elements, size_bytes = sum(type_.numel for type_ in types), sum(type_.size_bytes for type_ in types)
            yield Row(kind=kind.value, symbols=len(types), elements=elements, size_bytes=size_bytes)


def _symbol(symbol: Symbol) -> Row:
    type_, shapes = symbol.type, {"shape": symbol.type.shape, "whole_shape": symbol.whole.shape}
    of_type = {"dtype": type_.dtype, **shapes, "size_bytes": type_.size_bytes}
    names = {"offset": symbol.offset, "torch_names": symbol.torch_names}
    return Row(name=symbol.name, kind=symbol.kind.value, **of_type, **names)


def _groups(program: Program) -> Iterator[Row]:
    """`gradient_symbol` holds their gradients for data parallelism."""
    for group in program.groups:
        size_bytes = group.numel * DTYPE_BYTES[group.dtype]
        sizes = {"parameters": len(group.members), "elements": group.numel, "size_bytes": size_bytes}
        update = {"optimizer": program.optimizers[group.optimizer].name, "gradient_symbol": group.wrapper}
        yield Row(name=group.name, dtype=group.dtype, **sizes, **update)


_MOST_SYMBOLS = 40


def inspection(facts: Row, *, everything: bool) -> RenderableType:
    tables: list[RenderableType] = [summary_table(facts)]
    if facts.stages:
        sizes = "parameters_bytes, gradients_bytes, states_bytes, sent_bytes:sends a micro-batch"
        tables.append(table("pipeline", facts.stages, "rank, stages", f"operators, {sizes}"))
        tied = ((stage.rank, *pair) for stage in facts.stages for pair in stage.tied.items())
        said = "rank {} updates {}, whose gradient rank {} sends once a step"
        tables += [Text(printable(said.format(*copy))) for copy in tied]
    for graph in facts.graphs:
        title = f"{graph.name}: sections ({len(graph.sections)})"
        tables += [_sections_table(title, graph.sections), _operators_table(graph)]
        if graph.gathered:
            rows = [row.model_dump() | {"modules": first_of(row.modules)} for row in graph.gathered]
            title = f"{graph.name}: computed whole, of gathered parts"
            tables.append(table(title, rows, "operator, axis", "values, received_bytes", "modules"))
    tables.append(table("sizes", facts.sizes, "kind", "symbols, elements, size_bytes:bytes"))
    tables += [_groups_table(facts)] if facts.groups else []
    if not everything:
        return Group(*tables, Text("--all shows symbols, runtime arguments and options; --graph the operators"))
    tables.append(_symbols_table(facts))
    if facts.runtime_arguments:
        tables.append(table("runtime arguments", facts.runtime_arguments, "name:argument", "default", "meaning"))
    options = ((name.replace("_", " "), getattr(facts, name)) for name in _OPTIONS)
    return Group(*tables, *(options_table(title, values) for title, values in options if values))


def summary_table(facts: Row) -> Table:
    at_run_time = any(axis.at_run_time for axis in facts.mesh)
    of_several = any(axis.name != DATA_PARALLEL or axis.chips > 1 for axis in facts.mesh)
    chips, size = [axis.chips for axis in facts.mesh], facts.batch_size
    grouped_bytes = sum(group.size_bytes for group in facts.groups)
    reduced = f"{counted(len(facts.groups), 'group')}, {format_bytes(grouped_bytes)} to reduce each step"
    rows = [
        ("PEF", facts.pef),
        ("format", f"{facts.format_version}, written by {facts.writer}"),
        ("holds", "training step and evaluation" if facts.training else "inference"),
        ("replicas", f"{facts.world_size} or more, data parallel" if at_run_time else "1"),
        *(("chips a replica", f"{count}, each with {size // count} of {size} samples") for count in chips if count > 1),
        *_ranks_rows(facts),
        ("batch size", f"{size} for each replica"),
        *([("gradients", reduced)] if facts.data_parallel else ()),
        ("file", format_bytes(facts.file_bytes)),
        ("device memory", f"{format_bytes(facts.device_bytes)} for each {'rank' if of_several else 'replica'}"),
        *_zero_rows(facts),
        ("checked", "no" if facts.checked is None else str(facts.checked)),
        *((" by rounding", str(tensor)) for tensor in (facts.checked.exceptions if facts.checked else ())),
        ("digest", f"{facts.digest[:16]}…"),  # `verify` and --json have all 64
        ("weights sha256", f"{facts.weights_sha256[:16]}…"),
    ]
    return text_table(facts.name, ("", ""), (), rows)


def _ranks_rows(facts: Row) -> Iterator[tuple[str, str]]:
    parameter = SymbolKind.PARAMETER.value
    of_stages = [stage.parameters_bytes for stage in facts.stages]
    of_rank = max(of_stages or [size.size_bytes for size in facts.sizes if size.kind == parameter], default=0)
    at_most, one_pass = (" at most", "micro-batch") if of_stages else ("", "pass")
    for axis in (axis for axis in facts.mesh if axis.name != DATA_PARALLEL):
        each = f"each with {format_bytes(of_rank)} of {format_bytes(facts.parameter_bytes)} parameters{at_most}"
        received = f"each receives {format_bytes(axis.received_bytes)} a {one_pass}{at_most}"
        yield f"axis {axis.name}", f"{axis.size} ranks, {each}; {received}"
    parameters = [symbol for symbol in facts.symbols if symbol.kind == parameter]
    whole = [symbol for symbol in parameters if symbol.shape == symbol.whole_shape]
    if whole and any(axis.name == TENSOR for axis in facts.mesh):
        whole.sort(key=lambda symbol: -symbol.size_bytes)
        names = first_of([(*symbol.torch_names, symbol.name)[0] for symbol in whole])
        size = format_bytes(sum(symbol.size_bytes for symbol in whole))
        yield "whole along tp", f"{len(whole)} of {len(parameters)} parameters, {size}: {names}"


def _zero_rows(facts: Row) -> Iterator[tuple[str, str]]:
    if facts.data_parallel and facts.zero:
        whole = [(format_bytes(part.kept_bytes), f"{format_bytes(part.size_bytes)} {part.kind}") for part in facts.kept]
        fewest = next(axis.size for axis in facts.mesh if axis.name == DATA_PARALLEL)
        shares, of = [f"{kept} of {size}" for kept, size in whole], str(fewest)
        if fewest == 1:
            shares, of = [f"1/N of {size}" for _, size in whole[-facts.zero :]], "N replicas"
        yield f"ZeRO {facts.zero}", f"each of {of} keeps {', '.join(shares)}"


def section_detail(graph: Row, section: Row) -> RenderableType:
    reads, writes = (first_of(names, 4) for names in (section.reads, section.writes))
    sections = _sections_table(f"{graph.name}: section {section.index}", [section])
    return Group(sections, Text(printable(f"reads   {reads}\nwrites  {writes}")))


def _sections_table(title: str, sections: Sequence[Row]) -> Table:
    return table(title, sections, "index:section, kind, name", "operators, in_bytes, out_bytes")


def _operators_table(graph: Row) -> Table:
    shown = set[str]()

    def row(operator: Row) -> Mapping[str, object]:
        kind = "" if operator.kind in shown else operator.kind  # operators are in the order of their kinds
        shown.add(operator.kind)
        return operator.model_dump() | {"kind": kind, "sources": first_of(operator.sources)}

    title = f"{graph.name}: operators ({graph.nodes})"
    return table(title, map(row, graph.operators), "kind, operator", "count", "sources:source lines")


def _symbols_table(facts: Row) -> Table:
    shown = facts.symbols[:_MOST_SYMBOLS]
    rows = [symbol.model_dump() | {"type": f"{symbol.dtype}{list(symbol.shape)}"} for symbol in shown]
    title, hidden = f"symbols ({len(facts.symbols)})", len(facts.symbols) - _MOST_SYMBOLS
    symbols = table(title, rows, "name:symbol, kind, type", "offset, size_bytes:bytes")
    return replace(symbols, caption=f"and {hidden} more; --json lists all of them") if hidden > 0 else symbols


def _groups_table(facts: Row) -> Table:
    rows = [group.model_dump() for group in facts.groups]
    for row in rows:
        symbol = row["gradient_symbol"] or "not reduced"
        row["gradient_symbol"] = f"{symbol[:32]}…" if len(symbol) > 32 else symbol  # it ends in a hash; --all has it
    words, numbers = "name:group, optimizer, dtype", "parameters, elements, size_bytes:bytes"
    return table("parameter groups", rows, words, numbers, "gradient_symbol:gradients reduced as")


def options_table(title: str, values: Mapping[str, JsonValue]) -> Table:
    rows = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in sorted(values.items())]
    return text_table(title, ("", ""), (), rows)
