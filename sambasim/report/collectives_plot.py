"""The times of `sambasim bench collectives` over size, a curve a path."""

from sambasim.records.collectives import CollectivesRecord
from sambasim.report.log_chart import Chart, Curve, log_chart
from sambasim.units import format_bytes, format_seconds


def collectives_plot(record: CollectivesRecord) -> str:
    """An SVG document. A record without sizes gives one without lines."""
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
