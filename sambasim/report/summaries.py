"""What `sambasim compile` and `bench collectives` print at the end, and the mean step of a run, whose other lines are
in `terminal/progress.py`; and the bytes that a rank holds and receives, as `simulate` and `inspect` show them."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from sambasim.ir.dataflow import axis_of, pass_and_update
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.program import Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.types import SymbolKind
from sambasim.pef.document import Compiled
from sambasim.records.metrics import DEFINITIONS, CollectivesRecord, PredictedRecord, SizeRecord, SummaryRecord
from sambasim.report.tables import Column, Curve, Table, labelled, log_chart, text_table
from sambasim.units import GIGA, counted, format_bytes, format_rate, format_seconds


def next_command(program: Program, path: Path) -> str:
    predicts = program.training is None  # then one process has all ranks of a replica
    replicas = max(program.world_size, 2) if program.chooses_replicas else 1
    ranks = replicas * (1 if predicts else program.ranks_of_replica)
    # --reduce-on-rdu would turn off slices of gradients, and of parameters.
    flags = "--reduce-on-rdu " if program.data_parallel and program.zero < 2 else "--inference " * predicts
    return f"mpirun -np {ranks} sambasim run {flags}--pef {path}" if ranks > 1 else f"sambasim run {flags}--pef {path}"


def compilation_json(done: Compiled) -> str:
    program, graph = done.program, done.program.leading
    checked = None if done.checked is None else asdict(done.checked)
    facts = {
        **{"pef": str(done.path), "digest": done.digest},
        **{"sections": graph.section_counts, "operators": len(graph.nodes), "parameters": program.parameter_count},
        "gradient_groups": len(program.groups) if program.data_parallel else 0,
        **{name: getattr(program, name) for name in ("gradient_bytes", "device_bytes")},
        "pef_bytes": done.path.stat().st_size,
        **{name: getattr(program, name) for name in ("world_size", "ranks_of_replica", "chips")},
        **{"phases_s": done.phases_s, "checked": checked, "notices": list(done.notices)},
        "next": next_command(program, done.path),
    }
    return json.dumps(facts)


def compilation_report(done: Compiled, *, details: bool) -> list[RenderableType]:
    """Six lines, and a line for each notice; `details`: as a table, too."""
    program, graph = done.program, done.program.leading
    contents = f"{len(graph.nodes)} operators in {len(graph.sections)} sections ({_kinds(graph)})"
    compiled = f"compiled in {format_seconds(sum(done.phases_s.values()))} (measured)"
    parts: list[RenderableType] = [
        *((labelled(_details(done), indent=""), f"digest           {done.digest}") if details else ()),
        f"{program.name}: {program.parameter_count:,} parameters, {contents}; {compiled}",
    ]
    if program.ranks_of_replica > 1 or program.chooses_replicas:
        several = f"at least {counted(program.world_size, 'replica')}"
        replicas = several if program.chooses_replicas else "1 replica"
        ranks = f" of {program.ranks_of_replica} ranks" if program.ranks_of_replica > 1 else ""
        parts.append(f"runs on {replicas}{ranks}, each with {format_bytes(program.device_bytes)}")
    return [
        *parts,
        f"checked: {done.checked or 'no'}",
        *(f"notice: {notice}" for notice in done.notices),
        f"PEF file {done.path.absolute()} created",
        "Compilation succeeded",
        f"next: {next_command(program, done.path)}",
    ]


def _kinds(graph: Graph) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in graph.section_counts.items())


def _details(done: Compiled) -> Iterator[tuple[str, str]]:
    program, graph = done.program, done.program.leading
    yield "model", program.name
    yield "sections", f"{len(graph.sections)}: {_kinds(graph)}"
    yield "operators", str(len(graph.nodes))
    yield "parameters", f"{program.parameter_count:,}"
    if program.data_parallel:
        reduced = format_bytes(program.gradient_bytes)
        yield "gradient groups", f"{len(program.groups)}, {reduced} to reduce each step"
    if program.data_parallel or program.chooses_replicas:
        yield "replicas", f"at least {program.world_size}" if program.chooses_replicas else "1"
    if program.chips > 1:
        yield "chips a replica", chips_in_words(program.chips, program.replica_batch_size)
    if program.ranks_of_replica > 1:
        at_most, one_pass = ("", "pass") if program.schedule is None else ("at most ", "micro-batch")
        part, whole = (format_bytes(parameter_bytes(program, whole=whole)) for whole in (False, True))
        yield "ranks a replica", f"{program.ranks_of_replica}, each with {at_most}{part} of {whole} parameters"
        for axis in program.mesh:
            if axis.name != DATA_PARALLEL:
                received = format_bytes(received_bytes(program, axis.name))
                yield f"along {axis.name}", f"each rank receives {at_most}{received} a {one_pass}"
    holder = "rank" if program.ranks_of_replica > 1 else "replica"
    yield "device memory", f"{format_bytes(program.device_bytes)} a {holder}"
    yield "file size", format_bytes(done.path.stat().st_size)
    total_s = sum(done.phases_s.values())
    long = {name: time_s for name, time_s in done.phases_s.items() if time_s >= 0.01 * total_s}
    if len(long) < len(done.phases_s):
        long["the other phases"] = total_s - sum(long.values())
    lines = (f"  {format_seconds(time_s):>8}  {name}" for name, time_s in long.items())
    yield "time", "\n".join([f"{format_seconds(total_s)} (measured)", *lines])


def chips_in_words(chips: int, batch_size: int) -> str:
    return f"{chips}, each with {batch_size // chips} of {batch_size} samples"


def held_bytes(program: Program) -> Counter[SymbolKind]:
    """What the rank of `program` holds of each kind of symbol, without ZeRO."""
    held: Counter[SymbolKind] = Counter()
    for symbol in program.symbols.values():
        held[symbol.kind] += symbol.type.size_bytes
    return held


def parameter_bytes(program: Program, *, whole: bool) -> int:
    """Of the whole model, or of the rank with the most."""
    if whole:
        return sum(s.whole.size_bytes for s in program.symbols.values() if s.kind is SymbolKind.PARAMETER)
    return max(held_bytes(rank)[SymbolKind.PARAMETER] for rank in of_ranks(program))


def received_bytes(program: Program, axis: str) -> int:
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


def mean_step(summary: SummaryRecord, *, predicts: bool) -> tuple[Table, list[str]]:
    """Of a run, measured; `predicts`: with what is predicted for devices, or why nothing is. And notes."""
    predicted, notes = summary.predicted if predicts else None, []
    if summary.emulated:
        ranks = max(prod(summary.mesh.values()), summary.world_size)
        which = f"all {ranks} {'ranks' if ranks > summary.world_size else 'replicas'}"
        notes.append(f"measured: one process, which executed {which} in turn")
    if predicted is not None:
        notes.append(f"predicted: {predicted.predicted_backed_by}")
        if summary.host_sync not in (None, "mpi"):
            notes.append(f"predicted for a host sync by MPI, not by {summary.host_sync}")
    elif predicts:
        notes.append(f"no predicted times: {summary.not_predicted}")
    heads = ["what", "measured on this machine"]
    if predicted is not None:
        heads.append(f"predicted for {predicted.predicted_for}")
    return text_table("mean step", heads[:1], heads[1:], _step_rows(summary, predicted)), notes


def _step_rows(summary: SummaryRecord, predicted: PredictedRecord | None) -> Iterator[tuple[str, ...]]:
    sync_s = summary.sync_share * summary.training_s
    update_s = max(0.0, summary.training_s - summary.model_s - sync_s - sum(summary.waited_s.values()))
    of = {} if predicted is None else predicted.model_dump()
    waited_s = of.get("predicted_waited_s", {})
    rows: list[tuple[str, float | None, float | None]] = [
        ("whole step", summary.training_s, of.get("predicted_step_s")),
        ("forward and backward", summary.model_s, of.get("predicted_model_s")),
        *((f"waiting along {axis}", time_s, waited_s.get(axis, 0.0)) for axis, time_s in summary.waited_s.items()),
        ("waiting for sync", sync_s, of.get("predicted_sync_s")),
        ("update", update_s, of.get("predicted_update_s")),
    ]
    if predicted is not None:
        rows.append(("host: sections, inputs, outputs", None, predicted.predicted_host_s))
        rows.append(("sync during the backward", summary.hidden_sync_s, predicted.predicted_hidden_sync_s))
    for name, time_s, predicted_s in (row for row in rows if row[1] or row[2]):
        here = "-" if time_s is None else format_seconds(time_s / summary.steps_here)
        yield name, here, *([format_seconds(predicted_s or 0.0)] if predicted else ())
    rates = (summary.samples_per_s, *([predicted.predicted_samples_per_s] if predicted else ()))
    yield "samples/s", *map(format_rate, rates)


def step_times(summary: SummaryRecord, *, predicts: bool = False) -> list[RenderableType]:
    shown, notes = mean_step(summary, predicts=predicts)
    return [shown, *(["\n".join(notes)] if notes else [])]


def collectives_report(record: CollectivesRecord) -> RenderableType:
    nodes = counted(len(set(record.node_of)), "node")
    threads = f"{counted(record.threads, 'thread')} a rank"
    where = f"{record.world_size} ranks on {nodes}, {threads}, {record.mpi}, torch {record.torch}"
    left_out = (f"left out: {format_bytes(size.size_bytes)}: {size.reason}" for size in record.left_out)
    words, numbers = ("size", "path", "result, checked"), ("time", "alg GB/s", "bus GB/s", "× copy")
    size, path, result = (Column(head, is_whole=True) for head in words)
    columns = [size, path, *(Column(head, is_number=True) for head in numbers), result]
    *rows, _ = [row for size_record in record.sizes for row in _rows_of(size_record)]  # without the last blank line
    title = Text(f"all-reduce, measured: {where}", style="bold")
    return Group(title, Table("", columns, rows), *map(Text, (*left_out, *DEFINITIONS)))


def _rows_of(size: SizeRecord) -> Iterator[tuple[str, ...]]:
    heading = format_bytes(size.size_bytes)
    for path in size.paths:
        rates = (path.algorithm_bytes_per_s, path.bus_bytes_per_s)
        bandwidths = (f"{rate / GIGA:.3g}" if rate < GIGA else f"{rate / GIGA:.2f}" for rate in rates)
        how = "equal bits" if path.checked == "bits" else "within rounding"
        ratio = f"{path.to_copy_bound:.2f}"
        yield heading, path.path, format_seconds(path.measured_s), *bandwidths, ratio, f"{path.result}, {how}"
        heading = ""
    copied = f"{format_bytes(size.copy_bytes)} by all ranks"
    yield heading, "copy bound", format_seconds(size.copy_bound_s), "", "", "1.00", copied
    yield ()


def collectives_plot(record: CollectivesRecord) -> str:
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for size in record.sizes:
        for path in size.paths:
            times[path.path].append((size.size_bytes, path.measured_s))

    def short(form: Callable[[float], str]) -> Callable[[float], str]:
        return lambda value: form(value).replace(".0 ", " ").replace(".00 ", " ")

    bound = Curve("copy bound", [(size.size_bytes, size.copy_bound_s) for size in record.sizes], is_bound=True)
    curves = [*(Curve(name, points) for name, points in times.items()), bound]
    title = f"all-reduce, measured: {record.world_size} ranks, {record.mpi}"
    titles = ("size of the buffer, bytes", "time, seconds")
    return log_chart(title, titles, (short(format_bytes), short(format_seconds)), curves)
