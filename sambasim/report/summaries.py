"""What `sambasim compile`, `run` and `bench collectives` print at the end."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from sambasim.bounded import printable
from sambasim.ir.dataflow import axis_of, pass_and_update
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.program import Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.types import SymbolKind
from sambasim.pef import Checked
from sambasim.records.metrics import DEFINITIONS, CollectivesRecord, PredictedRecord, SizeRecord, SummaryRecord
from sambasim.report.svg import Chart, Curve, log_chart
from sambasim.report.tables import Column, Table, labelled, text_table
from sambasim.units import GIGA, counted, format_bytes, format_rate, format_seconds

_LEAST_SHARE = 0.01
"""Phases with less than this share of the time are added up."""


_SLICED = 2
"""The level of ZeRO from which a host sync keeps gradients in slices."""


def next_command(program: Program, path: Path) -> str:
    if program.training is None:
        return f"sambasim run --inference --pef {path}"
    replicas = max(program.world_size, 2) if _chooses_replicas(program) else 1
    ranks = replicas * program.ranks_of_replica
    whole = program.zero >= _SLICED  # which --reduce-on-rdu would turn off
    flags = "" if whole or not program.data_parallel else "--reduce-on-rdu "
    return f"mpirun -np {ranks} sambasim run {flags}--pef {path}" if ranks > 1 else f"sambasim run --pef {path}"


def compiled_json(
    program: Program,
    path: Path,
    digest: str,
    notices: Sequence[str],
    phases_s: Mapping[str, float],
    checked: Checked | None,
) -> str:
    graph = program.leading
    facts = {
        "pef": str(path),
        "digest": digest,
        "sections": graph.section_counts,
        "operators": len(graph.nodes),
        "parameters": _parameter_count(program),
        "gradient_groups": len(program.groups) if program.data_parallel else 0,
        "gradient_bytes": program.gradient_bytes,
        "device_bytes": program.device_bytes,
        "pef_bytes": path.stat().st_size,
        "world_size": program.world_size,
        "ranks_of_replica": program.ranks_of_replica,
        "chips": program.chips,
        "phases_s": phases_s,
        "checked": None if checked is None else asdict(checked),
        "notices": list(notices),
        "next": next_command(program, path),
    }
    return json.dumps(facts)


def compiled_report(
    program: Program,
    path: Path,
    digest: str,
    notices: Sequence[str],
    phases_s: Mapping[str, float],
    checked: Checked | None,
    *,
    details: bool = False,
) -> list[RenderableType]:
    """What was compiled, how it was checked, where it is, and what runs it, in six lines and a line for each notice;
    `details`: as a table, too."""
    graph = program.leading
    kinds = ", ".join(f"{count} {kind}" for kind, count in graph.section_counts.items())
    parts: list[RenderableType] = []
    if details:
        parts += [labelled(_details(program, path, phases_s), indent=""), f"digest           {digest}"]
    parts.append(
        f"{program.name}: {_parameter_count(program):,} parameters, {len(graph.nodes)} operators in "
        f"{len(graph.sections)} sections ({kinds}); compiled in {format_seconds(sum(phases_s.values()))} (measured)"
    )
    if program.ranks_of_replica > 1 or program.data_parallel:
        replicas = f"at least {counted(program.world_size, 'replica')}" if _chooses_replicas(program) else "1 replica"
        ranks = f" of {program.ranks_of_replica} ranks" if program.ranks_of_replica > 1 else ""
        parts.append(f"runs on {replicas}{ranks}, each with {format_bytes(program.device_bytes)}")
    return [
        *parts,
        f"checked: {checked or 'no'}",
        *(f"notice: {notice}" for notice in notices),
        f"PEF file {path.absolute()} created",
        "Compilation succeeded",
        f"next: {next_command(program, path)}",
    ]


def _chooses_replicas(program: Program) -> bool:
    return any(axis.at_run_time for axis in program.mesh)


def _details(program: Program, path: Path, phases_s: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    graph = program.leading
    sections = ", ".join(f"{count} {kind}" for kind, count in graph.section_counts.items())
    yield "model", program.name
    yield "sections", f"{len(graph.sections)}: {sections}"
    yield "operators", str(len(graph.nodes))
    yield "parameters", f"{_parameter_count(program):,}"
    if program.data_parallel:
        yield "gradient groups", f"{len(program.groups)}, {format_bytes(program.gradient_bytes)} to reduce each step"
        yield "replicas", f"at least {program.world_size}" if _chooses_replicas(program) else "1"
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
    yield "file size", format_bytes(path.stat().st_size)
    yield "time", "\n".join(_phase_lines(phases_s))


def chips_in_words(chips: int, batch_size: int) -> str:
    return f"{chips}, each with {batch_size // chips} of {batch_size} samples"


def _phase_lines(phases_s: Mapping[str, float]) -> list[str]:
    total_s = sum(phases_s.values())
    long = {name: time_s for name, time_s in phases_s.items() if time_s >= _LEAST_SHARE * total_s}
    lines = [f"{format_seconds(total_s)} (measured)"]
    lines += [f"  {format_seconds(time_s):>8}  {name}" for name, time_s in long.items()]
    if len(long) < len(phases_s):
        lines.append(f"  {format_seconds(total_s - sum(long.values())):>8}  the other phases")
    return lines


def _parameter_count(program: Program) -> int:
    return sum(s.whole.numel for s in program.symbols.values() if s.kind is SymbolKind.PARAMETER)


def held_bytes(own: Program) -> Counter[SymbolKind]:
    """What a rank with the program `own` holds of each kind of symbol, without ZeRO."""
    held: Counter[SymbolKind] = Counter()
    for symbol in own.symbols.values():
        held[symbol.kind] += symbol.type.size_bytes
    return held


def parameter_bytes(program: Program, *, whole: bool) -> int:
    """Of the whole model, or of the rank with the most."""
    if whole:
        return sum(s.whole.size_bytes for s in program.symbols.values() if s.kind is SymbolKind.PARAMETER)
    return max(held_bytes(own)[SymbolKind.PARAMETER] for own in of_ranks(program))


def received_bytes(program: Program, axis: str) -> int:
    """What a rank, the one with the most, receives along `axis` in a pass of the training step, or of the evaluation
    graph without one."""
    return max(_received_bytes(own, axis) for own in of_ranks(program))


def _received_bytes(own: Program, axis: str) -> int:
    """What a rank receives along `axis` in a pass: of a collective, the operands of all other ranks."""
    graph = own.leading
    others = sum(one.size - 1 for one in own.mesh if one.name == axis and not one.at_run_time)
    types = {name: symbol.type for name, symbol in own.symbols.items()} | dict(graph.values)
    received = 0
    for section in pass_and_update(graph)[0]:
        for node in graph.section_nodes(section):
            if axis_of(node) != axis or node.operator in ("comm.shard", "comm.send"):
                continue
            if node.operator == "comm.recv":
                received += types[node.results[0] or ""].size_bytes
            else:
                received += others * sum(types[name].size_bytes for name in node.reads)
    return received


_NOTHING = "-"


def mean_step(summary: SummaryRecord, predicted: PredictedRecord | None) -> list[tuple[str, ...]]:
    """The mean step of a run, as a heading and rows: measured here, and `predicted` in a separate column."""
    steps, heads = summary.steps_here, ("what", "measured on this machine")
    sync_s = summary.sync_share * summary.training_s
    update_s = max(0.0, summary.training_s - summary.model_s - sync_s - sum(summary.waited_s.values()))
    measured: list[tuple[str, float | None]] = [
        ("whole step", summary.training_s),
        ("forward and backward", summary.model_s),
        *((f"waiting along {axis}", seconds) for axis, seconds in summary.waited_s.items()),
        ("waiting for sync", sync_s),
        ("update", update_s),
    ]
    if predicted is None:
        rows = [(name, format_seconds(seconds / steps)) for name, seconds in measured if seconds]
        return [heads, *rows, ("samples/s", format_rate(summary.samples_per_s))]
    measured += [("host: sections, inputs, outputs", None), ("sync during the backward", summary.hidden_sync_s)]
    seconds_of = (
        predicted.predicted_step_s,
        predicted.predicted_model_s,
        *(predicted.predicted_waited_s.get(axis, 0.0) for axis in summary.waited_s),
        predicted.predicted_sync_s,
        predicted.predicted_update_s,
        predicted.predicted_host_s,
        predicted.predicted_hidden_sync_s,
    )
    both = [
        (name, _NOTHING if measured_s is None else format_seconds(measured_s / steps), format_seconds(predicted_s))
        for (name, measured_s), predicted_s in zip(measured, seconds_of, strict=True)
        if measured_s or predicted_s
    ]
    speeds = format_rate(summary.samples_per_s), format_rate(predicted.predicted_samples_per_s)
    return [(*heads, f"predicted for {predicted.predicted_for}"), *both, ("samples/s", *speeds)]


def notes_of_mean_step(summary: SummaryRecord, *, predicted: bool) -> list[str]:
    """What to know of its measured figures, and with `predicted` of the others, or the reason why there are none."""
    lines = []
    if summary.emulated:
        ranks = max(prod(summary.mesh.values()), summary.world_size)
        which = f"all {ranks} {'ranks' if ranks > summary.world_size else 'replicas'}"
        lines.append(f"measured: one process, which executed {which} in turn")
    if not predicted:
        return lines
    if summary.predicted is None:
        return [*lines, f"no predicted times: {summary.not_predicted}"]
    lines.append(f"predicted: {summary.predicted.predicted_backed_by}")
    if summary.host_sync not in (None, "mpi"):
        lines.append(f"predicted for a host sync by MPI, not by {summary.host_sync}")
    return lines


def step_times(summary: SummaryRecord, *, predicts: bool = False) -> list[RenderableType]:
    """The mean step of a run, measured, and with `predicts` beside it what is predicted for devices, or why not."""
    heads, *rows = mean_step(summary, summary.predicted if predicts else None)
    notes = notes_of_mean_step(summary, predicted=predicts)
    return [text_table("mean step", heads[:1], heads[1:], rows), *([printable("\n".join(notes))] if notes else [])]


def collectives_report(record: CollectivesRecord) -> RenderableType:
    nodes = counted(len(set(record.node_of)), "node")
    threads = f"{counted(record.threads, 'thread')} a rank"
    where = f"{record.world_size} ranks on {nodes}, {threads}, {record.mpi}, torch {record.torch}"
    left_out = (f"left out: {format_bytes(size.size_bytes)}: {size.reason}" for size in record.left_out)
    *rows, _ = [row for size in record.sizes for row in _rows_of(size)]  # without the last blank line
    title = Text(f"all-reduce, measured: {where}", style="bold")
    return Group(title, Table("", _COLUMNS, rows), *map(Text, (*left_out, *DEFINITIONS)))


_COLUMNS = (
    *(Column(head, is_whole=True) for head in ("size", "path")),
    *(Column(head, is_number=True) for head in ("time", "alg GB/s", "bus GB/s", "× copy")),
    Column("result, checked", is_whole=True),
)


def _rows_of(size: SizeRecord) -> Iterator[tuple[str, ...]]:
    heading = format_bytes(size.size_bytes)
    for path in size.paths:
        bandwidths = (_gigabytes(path.algorithm_bytes_per_s), _gigabytes(path.bus_bytes_per_s))
        how = "equal bits" if path.checked == "bits" else "within rounding"
        ratio = f"{path.to_copy_bound:.2f}"
        yield heading, path.path, format_seconds(path.measured_s), *bandwidths, ratio, f"{path.result}, {how}"
        heading = ""
    copied = f"{format_bytes(size.copy_bytes)} by all ranks"
    yield heading, "copy bound", format_seconds(size.copy_bound_s), "", "", "1.00", copied
    yield ()


def _gigabytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGA:.3g}" if bytes_per_s < GIGA else f"{bytes_per_s / GIGA:.2f}"


def collectives_plot(record: CollectivesRecord) -> str:
    times: dict[str, list[tuple[float, float]]] = {}
    for size in record.sizes:
        for path in size.paths:
            times.setdefault(path.path, []).append((size.size_bytes, path.measured_s))
    bound = Curve("copy bound", [(size.size_bytes, size.copy_bound_s) for size in record.sizes], is_bound=True)
    return log_chart(
        Chart(
            title=f"all-reduce, measured: {record.world_size} ranks, {record.mpi}",
            x_title="size of the buffer, bytes",
            y_title="time, seconds",
            x_words=lambda size: format_bytes(size).replace(".0 ", " "),
            y_words=lambda time_s: format_seconds(time_s).replace(".0 ", " ").replace(".00 ", " "),
            curves=[*(Curve(name, points) for name, points in times.items()), bound],
        )
    )
