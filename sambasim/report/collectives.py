"""The tables of `sambasim bench collectives`: what was measured, and apart from it what is predicted."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sambasim.records.collectives import DEFINITIONS, CollectivesRecord, LinkRecord, PredictionsRecord, SizeRecord
from sambasim.units import GIGA, format_bytes, format_seconds


def collectives_report(record: CollectivesRecord) -> RenderableType:
    """Everything for people: the table by size, what was left out, the definitions; and predictions, if any."""
    parts: list[RenderableType] = [measured_table(record)]
    parts += [Text(f"left out: {format_bytes(one.size_bytes)}: {one.reason}") for one in record.left_out]
    parts += [Text(line) for line in DEFINITIONS]
    if record.predictions is not None:
        parts += [Text(), predicted_table(record.predictions), Text(_parameters(record.predictions))]
    return Group(*parts)


def measured_table(record: CollectivesRecord) -> Table:
    """A block for each size: its paths, and the copy bound in whose units their times are given last."""
    nodes = len(set(record.node_of))
    where = f"{record.world_size} ranks on {nodes} node{'s' * (nodes > 1)}"
    threads = f"{record.threads} thread{'s' * (record.threads > 1)} a rank"
    table = _table(f"all-reduce, measured: {where}, {threads}, {record.mpi}, torch {record.torch}")
    for name in ("size", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "alg GB/s", "bus GB/s", "× copy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result, checked", no_wrap=True)
    for size in record.sizes:
        _add_size(table, size)
    return table


def predicted_table(predictions: PredictionsRecord) -> Table:
    """For each size the schedule with the lowest price. Nothing in it was measured."""
    table = _table("predicted, not measured: the schedule with the lowest price, if messages carried it out")
    table.add_column("size", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("schedule and reason", overflow="fold")
    for one in predictions.schedules:
        table.add_row(format_bytes(one.size_bytes), format_seconds(one.predicted_s), Text(one.reason))
    return table


def _add_size(table: Table, size: SizeRecord) -> None:
    heading = format_bytes(size.size_bytes)
    for path in size.paths:
        bandwidths = (_gigabytes(path.algorithm_bytes_per_s), _gigabytes(path.bus_bytes_per_s))
        how = "equal bits" if path.checked == "bits" else "within rounding"
        ratio = f"{path.to_copy_bound:.2f}"
        table.add_row(heading, path.path, format_seconds(path.measured_s), *bandwidths, ratio, f"{path.result}, {how}")
        heading = ""
    copied = f"{format_bytes(size.copy_bytes)} by all ranks"
    table.add_row(heading, "copy bound", format_seconds(size.copy_bound_s), "", "", "1.00", copied, end_section=True)


def _gigabytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGA:.3g}" if bytes_per_s < GIGA else f"{bytes_per_s / GIGA:.2f}"


def _parameters(predictions: PredictionsRecord) -> str:
    links = [
        f"{where}: {_link(link)}"
        for where, link in (("within a node", predictions.within), ("between nodes", predictions.between))
        if link is not None
    ]
    added = f"additions {1 / predictions.addition_s_per_byte / GIGA:.2f} GB/s"
    return f"from these parameters, measured in this run by MPI messages of two ranks: {'; '.join([*links, added])}"


def _link(link: LinkRecord) -> str:
    rate = f"{1 / link.transfer_s_per_byte / GIGA:.2f} GB/s" if link.transfer_s_per_byte else "bytes at no cost"
    return f"latency {format_seconds(link.latency_s)}, {rate}"


def _table(title: str) -> Table:
    # A title is wrapped to its table, so the table is as wide where the terminal is.
    return Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
