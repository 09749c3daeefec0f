"""`measure_sections`: the time that each section of a PEF takes on this machine."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict, JsonValue
from torch import nn

from sambasim.ir.graph import Section
from sambasim.samba import context
from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.request import Inputs
from sambasim.samba.session import session
from sambasim.samba.utils.measuring import (
    MEASURED,
    WARM_UP_STEPS,
    checked_kinds,
    median_and_slow,
    report,
    spread,
    time_steps,
    timed_step,
    title,
)
from sambasim.samba.utils.predicting import NOT_PREDICTED, DeviceColumn
from sambasim.units import format_seconds


class SectionFigure(BaseModel):
    """One row: a section, or several that run as one pass over memory.

    sections: their indices in the graph
    measured_s: on this machine, the median over steps; with several replicas, of the one that it took longest
    predicted_s: on the device, by the model of `sambasim simulate`; None where there is nothing to predict
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sections: tuple[int, ...]
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
    """Run the loaded PEF on `inputs` repeatedly, and print how long each of its sections takes. Collective.

    The arguments are those of `measure_performance`; `run_graph_only` and `num_sections` have no effect. Sections run
    one after another: gradient sync, which otherwise overlaps the backward, waits for its end, so the sum can be more
    than a step. With one replica REDUCE and GATHER do nothing, and are not predicted. Without `reduce_on_rdu` the
    prediction of REDUCE includes GATHER. With several replicas, `reduce_on_rdu` and 64 KiB of gradients or more,
    REDUCE, OPT and GATHER are one pass over memory, and have one row.

    Raises OptionError and KeywordError as `measure_performance` does.
    """
    program = session.program(model)
    kinds = checked_kinds(program, batch_size, n_iterations, inference=inference)
    step = timed_step(inputs, kinds, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
    with session.timed(model) as clock:
        steps = len(time_steps(step, n_iterations, min_duration))
    world = context.communicator()
    passes = clock.passes[WARM_UP_STEPS:]
    medians = [statistics.median(one.elapsed_s for one in times) for times in zip(*passes, strict=True)]
    sums = median_and_slow([sum(one.elapsed_s for one in times) for times in passes])
    median_s, slow_s = map(max, zip(*world.all_gather_object(sums), strict=True))
    slowest = [max(times) for times in zip(*world.all_gather_object(medians), strict=True)]
    column = DeviceColumn(model, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
    graph = program.training or program.evaluation
    by_section_s = {} if column.step is None else column.step.by_section_s(graph.sections)
    rows = [_figure(one.sections, measured_s, by_section_s) for one, measured_s in zip(passes[0], slowest, strict=True)]
    predicted_s = _sum_of_known(row.predicted_s for row in rows)
    figures: dict[str, JsonValue] = {
        "measured": MEASURED,
        "replicas": world.world_size,
        "batch_size": program.batch_size,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "sections_s": sum(slowest),
        "predicted_sections_s": predicted_s,
        **column.figures(),
        "step_p90_s": slow_s,
        "sections": [row.model_dump(mode="json") for row in rows],
    }
    table = _table(rows, predicted_s, title(world.world_size, steps)) + spread(median_s, slow_s, steps) + "\n"
    table += column.told()
    report(figures, table, json, bench_report_json, compiled_stats_json)
    return figures


def _figure(sections: Sequence[Section], measured_s: float, by_section_s: Mapping[int, float]) -> SectionFigure:
    first, last = sections[0], sections[-1]
    return SectionFigure(
        sections=tuple(section.index for section in sections),
        kind="+".join(dict.fromkeys(section.kind.value for section in sections)),
        name=first.name if first is last else f"{first.name} … {last.name}",
        measured_s=measured_s,
        predicted_s=_sum_of_known(by_section_s.get(section.index) for section in sections),
    )


def _sum_of_known(times_s: Iterable[float | None]) -> float | None:
    known = [time_s for time_s in times_s if time_s is not None]
    return sum(known) if known else None


def _told(predicted_s: float | None) -> str:
    return NOT_PREDICTED if predicted_s is None else format_seconds(predicted_s)


def _table(rows: Sequence[SectionFigure], predicted_s: float | None, heading: str) -> str:
    cells = [("section", "kind", "name", "measured", "predicted")]
    for row in rows:
        index = "-".join(map(str, dict.fromkeys((row.sections[0], row.sections[-1]))))
        cells.append((index, row.kind, row.name, format_seconds(row.measured_s), _told(row.predicted_s)))
    cells.append(("all", "", "", format_seconds(sum(row.measured_s for row in rows)), _told(predicted_s)))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "  ".join(
            cell.rjust(width) if column >= 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([heading, *lines, ""])
