"""The tables and the plot of `sambasim bench collectives`."""

import io
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

from rich.console import Console

from sambasim.records.collectives import (
    CollectivesRecord,
    LeftOutRecord,
    PathRecord,
    SizeRecord,
)
from sambasim.report.summaries import collectives_plot, collectives_report
from sambasim.units import KIB, MIB

SVG = "{http://www.w3.org/2000/svg}"


def path(name: str, measured_s: float, size_bytes: int, copy_bound_s: float) -> PathRecord:
    rate = size_bytes / measured_s
    return PathRecord(
        path=name,
        result="mean" if name == "device" else "sum",
        checked="bits" if name == "device" else "rounding",
        measured_s=measured_s,
        least_s=measured_s,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=1.5 * rate,
        to_copy_bound=measured_s / copy_bound_s,
    )


def size(size_bytes: int, device_s: float, gloo_s: float, copy_bound_s: float) -> SizeRecord:
    paths = (path("device", device_s, size_bytes, copy_bound_s), path("gloo", gloo_s, size_bytes, copy_bound_s))
    return SizeRecord(
        size_bytes=size_bytes, runs=3, copy_bytes=5 * size_bytes // 2, copy_bound_s=copy_bound_s, paths=paths
    )


RECORD = CollectivesRecord(
    world_size=4,
    node_of=(0, 0, 1, 1),
    threads=2,
    torch="2.13.0",
    mpi="MPICH 5.0.2",
    sizes=(size(4 * KIB, 1e-5, 2e-3, 5e-6), size(MIB, 4e-5, 3e-3, 3.2e-5)),
    left_out=(LeftOutRecord(size_bytes=64 * MIB, reason="not [enough] shared memory"),),
)


def printed(record: CollectivesRecord) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(collectives_report(record))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_table_has_a_line_for_each_path_and_each_bound() -> None:
    lines = printed(RECORD)
    assert lines[0] == "all-reduce, measured: 4 ranks on 2 nodes, 2 threads a rank, MPICH 5.0.2, torch 2.13.0"
    assert "4.0 KiB device 10.0 us 0.41 0.614 2.00 mean, equal bits" in lines
    assert "gloo 3.0 ms 0.35 0.524 93.75 sum, within rounding" in lines
    assert "1.0 MiB device 40.0 us 26.21 39.32 1.25 mean, equal bits" in lines
    assert "copy bound 32.0 us 1.00 2.5 MiB by all ranks" in lines
    assert "left out: 64.0 MiB: not [enough] shared memory" in lines


def test_the_plot_has_a_line_for_each_path_with_its_name_at_the_end() -> None:
    root = ElementTree.fromstring(collectives_plot(RECORD))
    lines = {line.get("stroke"): line for line in root.iter(f"{SVG}polyline")}
    words = {text.text: text for text in root.iter(f"{SVG}text")}
    assert len(lines) == 3
    assert {"4 KiB", "1 MiB", "size of the buffer, bytes", "time, seconds", "10 us", "100 us"} <= set(words)
    for name in ("device", "gloo", "copy bound"):
        points = [
            tuple(map(float, point.split(","))) for point in lines[words[name].get("fill")].get("points", "").split()
        ]
        assert len(points) == 2
        assert float(words[name].get("x", "")) > points[-1][0]
    heights = [float(words[name].get("y", "")) for name in ("gloo", "device", "copy bound")]
    assert heights == sorted(heights)
    assert all(lower - upper >= 15 for upper, lower in pairwise(heights))


def test_the_longest_name_fits_beside_its_line() -> None:
    name = "host-parameter-server"
    widest_character = 0.6  # of the size of the font, on average
    sizes = tuple(
        one.model_copy(update={"paths": (path(name, 1e-3, one.size_bytes, one.copy_bound_s),)}) for one in RECORD.sizes
    )
    root = ElementTree.fromstring(collectives_plot(RECORD.model_copy(update={"sizes": sizes})))
    (label,) = [text for text in root.iter(f"{SVG}text") if text.text == name]
    width = widest_character * float(label.get("font-size", "")) * len(name)
    assert float(label.get("x", "")) + width <= float(root.get("width", ""))


def test_equal_factors_are_equally_long() -> None:
    root = ElementTree.fromstring(collectives_plot(RECORD))
    height = {text.text: float(text.get("y", "")) for text in root.iter(f"{SVG}text")}
    assert height["10 us"] - height["100 us"] == height["100 us"] - height["1 ms"] > 0


def test_a_single_size_and_none_can_be_drawn() -> None:
    one = RECORD.model_copy(update={"sizes": RECORD.sizes[:1]})
    assert len(list(ElementTree.fromstring(collectives_plot(one)).iter(f"{SVG}circle"))) == 3
    none = RECORD.model_copy(update={"sizes": ()})
    assert len(list(ElementTree.fromstring(collectives_plot(none)).iter(f"{SVG}polyline"))) == 0
