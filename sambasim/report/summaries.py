"""What `sambasim compile` and `bench collectives` print at the end, and the mean step of a run, whose other lines are
in `terminal/progress.py`."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from sambasim.ir.program import Program
from sambasim.pef import read
from sambasim.pef.document import Compiled
from sambasim.records.metrics import DEFINITIONS, CollectivesRecord, PredictedRecord, SizeRecord, SummaryRecord
from sambasim.report.inspect import contents, summary_table
from sambasim.report.tables import Column, Curve, Table, log_chart, text_table
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
    """Six lines, and a line for each notice; `details`: with tables of the PEF and of all phases."""
    program, graph = done.program, done.program.leading
    kinds = ", ".join(f"{count} {kind}" for kind, count in graph.section_counts.items())
    holds = f"{program.parameter_count:,} parameters, {len(graph.nodes)} operators in {len(graph.sections)} sections"
    compiled = f"compiled in {format_seconds(sum(done.phases_s.values()))} (measured)"
    parts: list[RenderableType] = [
        *(_details(done) if details else ()),
        f"{program.name}: {holds} ({kinds}); {compiled}",
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


def _details(done: Compiled) -> Iterator[RenderableType]:
    """What `inspect` says of the PEF, its whole digest, and the times of all phases."""
    yield summary_table(contents(done.path, read(done.path)))
    total_s = sum(done.phases_s.values())
    long = {name: time_s for name, time_s in done.phases_s.items() if time_s >= 0.01 * total_s}
    if len(long) < len(done.phases_s):
        long["the other phases"] = total_s - sum(long.values())
    rows = [(name, format_seconds(time_s)) for name, time_s in long.items()]
    yield text_table("phases", ["phase"], ["measured"], rows)
    yield f"digest {done.digest}"


def mean_step(summary: SummaryRecord, *, predicts: bool) -> tuple[Table, list[str]]:
    """Of a run, measured; `predicts`: with what is predicted for devices, or why nothing is. And notes."""
    predicted, notes = summary.predicted if predicts else None, []
    if summary.emulated:
        ranks = max(prod(summary.mesh.values()), summary.world_size)
        which = f"all {ranks} {'ranks' if ranks > summary.world_size else 'replicas'}"
        notes.append(f"measured: one process, which executed {which} in turn")
    if predicted is not None:
        from sambasim.simulation.prediction import PRICED_IN

        notes.append(f"predicted: {PRICED_IN}; {predicted.predicted_backed_by}")
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
