"""`measure_performance` and `measure_sections`: times of a step, and of each section, on this machine.

The time predicted for the device of the PEF is printed beside it, with its source.
"""

import json as json_format
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import JsonValue
from torch import nn

from sambasim.errors import OptionError
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.program import Program
from sambasim.samba import context
from sambasim.samba.checks.arguments import checks_keywords
from sambasim.samba.checks.findings import app_line
from sambasim.samba.inputs import Inputs
from sambasim.samba.notices import say_once
from sambasim.samba.session import session
from sambasim.samba.test import write_json
from sambasim.samba.utils.common import get_pef_info
from sambasim.samba.utils.parser import Arguments
from sambasim.units import counted, format_seconds

if TYPE_CHECKING:
    from sambasim.samba.utils.prediction import Prediction

_WARM_UP_STEPS = 3
_FEW_STEPS = 10
_UNEVEN = 2.0
"""From _FEW_STEPS steps on, a notice is printed if the 90th percentile is at least this multiple of the median."""


class Performance(NamedTuple):
    """`throughput` in samples/s of all replicas, `latency` in seconds a step."""

    throughput: float
    latency: float


@checks_keywords
def measure_performance(
    model: nn.Module,
    inputs: Inputs,
    batch_size: int,
    n_chips: int = 1,
    inference: bool = False,
    run_graph_only: bool = False,
    n_iterations: int = 100,
    min_duration: float = 0.0,
    json: str | None = None,
    bench_report_json: str | None = None,
    compiled_stats_json: str | None = None,
    data_parallel: bool = False,
    reduce_on_rdu: bool = False,
    world_size: int | None = None,
    use_sambaloader: bool = False,
    set_output_grads: bool = True,
    json_counters: str | None = None,
) -> Performance:
    """Runs the loaded PEF on `inputs` repeatedly, and prints how long a step takes on this machine. Collective.

    batch_size: that of the PEF; a default of -b that differs has no effect
    inference: run the forward only; otherwise the steps train the model
    run_graph_only: a step is the sum of its sections, one after another, without copies of inputs and checks
    min_duration: seconds; more than `n_iterations` steps are timed until they have taken so long
    json: a file for the figures, or "-" to print them as JSON instead of the table
    bench_report_json, compiled_stats_json: files for the figures, and for the output of `sambasim inspect --json`

    No effect: n_chips (the PEF decides), world_size, use_sambaloader, set_output_grads, json_counters. Raises
    OptionError if no PEF is loaded for `model`, or for another batch size; AssertionError if --min-throughput is not
    reached.
    """
    if json_counters is not None:
        say_once("json_counters", "there is no device that counts", app_line())
    program = session.program(model)
    kinds = _checked_kinds(program, batch_size, n_iterations, inference=inference)
    step = _timed_step(inputs, kinds, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)

    def graph_alone() -> float:
        with session.timed(model) as clock:
            step()
        return sum(one.elapsed_s for one in clock.passes[-1])

    world = context.communicator()
    column = _prediction(model, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
    predicted_s = column.step_s(forward_only=kinds is not None, graph_only=run_graph_only)
    times_s = _time_steps(graph_alone if run_graph_only else step, n_iterations, min_duration)
    median_s, slow_s = map(max, zip(*world.all_gather_object(median_and_slow(times_s)), strict=True))
    measured = Performance(world.world_size * program.batch_size / median_s, median_s)
    figures: dict[str, JsonValue] = {
        **_circumstances(program, len(times_s)),
        "step_s": median_s,
        "step_p90_s": slow_s,
        "samples_per_s": measured.throughput,
        "predicted_step_s": predicted_s,
        **column.figures,
    }
    predicted_text = "" if predicted_s is None else f"predicted for a device: {format_seconds(predicted_s)} a step\n"
    table = (
        f"{_title(world.world_size, len(times_s))}: "
        f"{format_seconds(median_s)} a step, {measured.throughput:.0f} samples/s\n"
        f"{spread(median_s, slow_s, len(times_s))}\n"
        f"{predicted_text}{column.text}"
    )
    _report(figures, table, json, bench_report_json, compiled_stats_json)
    least = getattr(context.current().arguments, "min_throughput", None)
    if isinstance(least, int | float) and measured.throughput < least:
        raise AssertionError(f"{measured.throughput:.1f} samples/s were measured, and --min-throughput is {least:g}")
    return measured


@dataclass(frozen=True, slots=True)
class SectionFigure:
    """One row: the section with this index, or several that run as one pass over memory.

    measured_s: the median over steps on this machine, of the slowest replica
    predicted_s: on the device, by the model of `sambasim simulate`; None without a prediction
    """

    sections: list[int]
    kind: str
    name: str
    measured_s: float
    predicted_s: float | None = None


@checks_keywords
def measure_sections(
    model: nn.Module,
    inputs: Inputs,
    batch_size: int | None = None,
    n_chips: int = 1,
    inference: bool = False,
    run_graph_only: bool = False,
    n_iterations: int = 100,
    min_duration: float = 0.0,
    json: str | None = None,
    bench_report_json: str | None = None,
    compiled_stats_json: str | None = None,
    data_parallel: bool = False,
    reduce_on_rdu: bool = False,
    num_sections: int | None = None,
) -> dict[str, JsonValue]:
    """Runs the loaded PEF on `inputs` repeatedly, and prints how long each of its sections takes. Collective.

    The arguments are those of `measure_performance`; `run_graph_only` and `num_sections` have no effect. Sections run
    one after another, without overlap, so their sum can exceed a step; sections that run as one pass have one row. With
    one replica, REDUCE and GATHER are not predicted; without `reduce_on_rdu`, REDUCE includes GATHER.
    """
    program = session.program(model)
    kinds = _checked_kinds(program, batch_size, n_iterations, inference=inference)
    step = _timed_step(inputs, kinds, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
    with session.timed(model) as clock:
        steps = len(_time_steps(step, n_iterations, min_duration))
    world = context.communicator()
    passes = clock.passes[_WARM_UP_STEPS:]
    medians = [statistics.median(one.elapsed_s for one in times) for times in zip(*passes, strict=True)]
    sums = median_and_slow([sum(one.elapsed_s for one in times) for times in passes])
    median_s, slow_s = map(max, zip(*world.all_gather_object(sums), strict=True))
    slowest = [max(times) for times in zip(*world.all_gather_object(medians), strict=True)]
    column = _prediction(model, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
    graph = program.leading
    by_section_s = {} if column.step is None else column.step.by_section_s(graph.sections)
    rows = [_figure(one.sections, measured_s, by_section_s) for one, measured_s in zip(passes[0], slowest, strict=True)]
    predicted_s = _sum_of_known(row.predicted_s for row in rows)
    figures: dict[str, JsonValue] = {
        **_circumstances(program, steps),
        "sections_s": sum(slowest),
        "predicted_sections_s": predicted_s,
        **column.figures,
        "step_p90_s": slow_s,
        "sections": [asdict(row) for row in rows],
    }
    table = _table(rows, predicted_s, _title(world.world_size, steps)) + spread(median_s, slow_s, steps) + "\n"
    table += column.text
    _report(figures, table, json, bench_report_json, compiled_stats_json)
    return figures


def _circumstances(program: Program, steps: int) -> dict[str, JsonValue]:
    return {
        "measured": "on this machine, not on a device",
        "replicas": context.communicator().world_size,
        "batch_size": program.batch_size,
        "steps": steps,
        "threads": torch.get_num_threads(),
    }


def _figure(sections: Sequence[Section], measured_s: float, by_section_s: Mapping[int, float]) -> SectionFigure:
    first, last = sections[0], sections[-1]
    return SectionFigure(
        sections=[section.index for section in sections],
        kind="+".join(dict.fromkeys(section.kind.value for section in sections)),
        name=first.name if first is last else f"{first.name} … {last.name}",
        measured_s=measured_s,
        predicted_s=_sum_of_known(by_section_s.get(section.index) for section in sections),
    )


def _sum_of_known(times_s: Iterable[float | None]) -> float | None:
    known = [time_s for time_s in times_s if time_s is not None]
    return sum(known) if known else None


def _table(rows: Sequence[SectionFigure], predicted_s: float | None, heading: str) -> str:
    def seconds(time_s: float | None) -> str:
        return "-" if time_s is None else format_seconds(time_s)

    cells = [("section", "kind", "name", "measured", "predicted")]
    for row in rows:
        index = "-".join(map(str, dict.fromkeys((row.sections[0], row.sections[-1]))))
        cells.append((index, row.kind, row.name, format_seconds(row.measured_s), seconds(row.predicted_s)))
    cells.append(("all", "", "", format_seconds(sum(row.measured_s for row in rows)), seconds(predicted_s)))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "  ".join(
            cell.rjust(width) if column >= 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([heading, *lines, ""])


def _prediction(model: nn.Module, *, data_parallel: bool, reduce_on_rdu: bool) -> "Prediction":
    from sambasim.samba.utils.prediction import Prediction  # the device model, which most runs do without

    return Prediction(model, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)


def _checked_kinds(
    program: Program, batch_size: int | None, n_iterations: int, *, inference: bool
) -> list[SectionKind] | None:
    """The section types of a measured step; None for all. Raises OptionError for a wrong batch size or no steps."""
    if batch_size not in (None, program.batch_size) and not _is_default(batch_size):
        what = f"the batch size is {batch_size}, and the PEF was compiled for {program.batch_size}"
        raise OptionError(what, remedy=f"-b {program.batch_size}, or compile again")
    if n_iterations < 1:
        raise OptionError(f"{n_iterations} steps cannot be timed", remedy="--num-iterations 1 or more")
    return [SectionKind.FWD] if inference or program.training is None else None


def _is_default(batch_size: int | None) -> bool:
    """Whether `batch_size` is the default of -b: an app may ignore -b, so that its batches have another size."""
    arguments = context.current().arguments
    return (
        isinstance(arguments, Arguments)
        and "batch_size" not in arguments.typed
        and batch_size == getattr(arguments, "batch_size", None)
    )


def _timed_step(
    inputs: Inputs, kinds: list[SectionKind] | None, *, data_parallel: bool, reduce_on_rdu: bool
) -> Callable[[], float]:
    """A function that runs the sections of `kinds` once and returns the seconds."""

    def step() -> float:
        began_s = time.perf_counter()
        session.run(inputs, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu, section_types=kinds)
        return time.perf_counter() - began_s

    return step


def _time_steps(step: Callable[[], float], n_iterations: int, min_duration: float) -> list[float]:
    """The seconds that each call of `step` returns, after warm-up calls. Collective."""
    for _ in range(_WARM_UP_STEPS):
        step()
    times_s = [step() for _ in range(n_iterations)]
    # Steps are collective, so all ranks take the most that one of them needs.
    left_s = max(0.0, min_duration - sum(times_s))
    more = context.communicator().all_gather_object(round(left_s / statistics.median(times_s)))
    return times_s + [step() for _ in range(max(more))]


def spread(median_s: float, slow_s: float, steps: int) -> str:
    """The number of threads, how much the times differ, and a likely reason."""
    threads = torch.get_num_threads()
    text = f"median, with {counted(threads, 'thread')} a replica; 9 of 10 steps took {format_seconds(slow_s)} or less"
    if steps < _FEW_STEPS or slow_s < _UNEVEN * median_s:
        return text
    alone = "" if threads == 1 else "; or threads wait for each other: try --threads 1"
    return f"{text}\nnotice: times of steps differ much: other work may run on these cores{alone}"


def median_and_slow(times_s: list[float]) -> tuple[float, float]:
    """The median and the 90th percentile."""
    return statistics.median(times_s), sorted(times_s)[math.ceil(0.9 * len(times_s)) - 1]


def _title(replicas: int, steps: int) -> str:
    return f"measured on this machine, {counted(replicas, 'replica')}, {counted(steps, 'step')}"


def _report(
    figures: Mapping[str, JsonValue],
    table: str,
    json: str | None,
    bench_report_json: str | None,
    compiled_stats_json: str | None,
) -> None:
    """Rank 0 prints the figures, as one line of JSON or as `table`, and writes the given files."""
    if context.communicator().rank != 0:
        return
    for file in (json, bench_report_json):
        if file is not None and file != "-":
            write_json(file, figures)
    if compiled_stats_json is not None:
        write_json(compiled_stats_json, get_pef_info(str(getattr(context.current().arguments, "pef", None))))
    sys.stdout.write(f"{json_format.dumps(figures)}\n" if json == "-" else table)
    sys.stdout.flush()
