"""The output of `sambasim bench collectives`: a table of measurements, and a plot."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sambasim.records.collectives import DEFINITIONS, CollectivesRecord, SizeRecord
from sambasim.report.output import Chart, Curve, log_chart
from sambasim.units import GIGA, format_bytes, format_seconds


def collectives_report(record: CollectivesRecord) -> RenderableType:
    """The text output: measurements by size, sizes left out, and definitions."""
    parts: list[RenderableType] = [measured_table(record)]
    parts += [Text(f"left out: {format_bytes(one.size_bytes)}: {one.reason}") for one in record.left_out]
    parts += [Text(line) for line in DEFINITIONS]
    return Group(*parts)


def measured_table(record: CollectivesRecord) -> Table:
    """A block for each size: its paths, and the copy bound. The column "× copy" is time relative to that bound."""
    nodes = len(set(record.node_of))
    where = f"{record.world_size} ranks on {nodes} node{'s' * (nodes > 1)}"
    threads = f"{record.threads} thread{'s' * (record.threads > 1)} a rank"
    table = _wide_table(f"all-reduce, measured: {where}, {threads}, {record.mpi}, torch {record.torch}")
    for name in ("size", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "alg GB/s", "bus GB/s", "× copy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result, checked", no_wrap=True)
    for size in record.sizes:
        _add_size(table, size)
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


def _wide_table(title: str) -> Table:
    # Without the minimum width of `plain_table`: this title is longer than a terminal is wide.
    return Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def collectives_plot(record: CollectivesRecord) -> str:
    """The times over buffer size as an SVG document, one curve per path."""
    names = dict.fromkeys(path.path for size in record.sizes for path in size.paths)
    curves = [
        Curve(
            name,
            [(size.size_bytes, path.measured_s) for size in record.sizes for path in size.paths if path.path == name],
        )
        for name in names
    ]
    bound = Curve("copy bound", [(size.size_bytes, size.copy_bound_s) for size in record.sizes], is_bound=True)
    return log_chart(
        Chart(
            title=f"all-reduce, measured: {record.world_size} ranks, {record.mpi}",
            x_title="size of the buffer, bytes",
            y_title="time, seconds",
            x_words=lambda size: format_bytes(size).replace(".0 ", " "),
            y_words=lambda time_s: format_seconds(time_s).replace(".0 ", " ").replace(".00 ", " "),
            curves=[*curves, bound],
        )
    )
