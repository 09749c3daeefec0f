"""`measure_performance`: the time that a step of a PEF takes on this machine; and what `measure_sections` shares.

The time that is predicted for the device of the PEF is printed apart, with the evidence for it.
"""

import json as json_format
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import nn

from sambasim.errors import OptionError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.samba import context
from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once
from sambasim.samba.request import Inputs
from sambasim.samba.session import session
from sambasim.samba.utils.json_file import write_json
from sambasim.samba.utils.parser import Arguments
from sambasim.samba.utils.pef_utils import get_pef_info
from sambasim.samba.utils.predicting import DeviceColumn
from sambasim.simulation.compiled import CompiledStep
from sambasim.units import format_seconds

WARM_UP_STEPS = 3
MEASURED = "on this machine, not on a device"
_FEW_STEPS = 10
_UNEVEN = 2.0
"""From here on, times the median, a slow step is worth a note, unless steps are so few that one of them makes it."""


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
    """Run the loaded PEF on `inputs` repeatedly, and print how long a step takes on this machine. Collective.

    run_graph_only: a step is then the sum of its sections, one after another, without the copies of inputs and checks
    n_iterations: timed steps, after WARM_UP_STEPS that are not
    min_duration: seconds; more steps than n_iterations are timed until they have taken so long
    json: a file for the figures, or "-" for a line on stdout instead of the table
    bench_report_json, compiled_stats_json: files for the figures, and for the output of `sambasim inspect --json`
    data_parallel, reduce_on_rdu: as for session.run

    A training PEF is trained while it is measured; with `inference`, or an inference PEF, only its forward runs.
    No effect: n_chips, world_size, use_sambaloader, set_output_grads, json_counters. `predicted_step_s` of the figures
    is what the device of the PEF would take, by the model of `sambasim simulate`: host time included, unless it is
    `run_graph_only`.
    A batch size that was typed must be that of the PEF; the default of -b may be another, and has no effect then.
    Raises OptionError if no PEF is loaded for `model`, or for another batch size; AssertionError if --min-throughput
    was given and is not reached.
    """
    if json_counters is not None:
        say_once("json_counters", "there is no device that counts", app_line())
    program = session.program(model)
    kinds = checked_kinds(program, batch_size, n_iterations, inference=inference)
    batch_size = program.batch_size
    step = timed_step(inputs, kinds, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)

    def graph_alone() -> float:
        with session.timed(model) as clock:
            step()
        return sum(one.elapsed_s for one in clock.passes[-1])

    world = context.communicator()
    column = DeviceColumn(model, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
    predicted_s = _predicted_s(column.step, forward_only=kinds is not None, graph_only=run_graph_only)
    times_s = time_steps(graph_alone if run_graph_only else step, n_iterations, min_duration)
    median_s, slow_s = map(max, zip(*world.all_gather_object(median_and_slow(times_s)), strict=True))
    figures: dict[str, JsonValue] = {
        "measured": MEASURED,
        "replicas": world.world_size,
        "batch_size": batch_size,
        "steps": len(times_s),
        "threads": torch.get_num_threads(),
        "step_s": median_s,
        "step_p90_s": slow_s,
        "samples_per_s": world.world_size * batch_size / median_s,
        "predicted_step_s": predicted_s,
        **column.figures(),
    }
    predicted_told = "" if predicted_s is None else f"predicted for a device: {format_seconds(predicted_s)} a step\n"
    table = (
        f"{title(world.world_size, len(times_s))}: "
        f"{format_seconds(median_s)} a step, {world.world_size * batch_size / median_s:.0f} samples/s\n"
        f"{spread(median_s, slow_s, len(times_s))}\n"
        f"{predicted_told}{column.told()}"
    )
    report(figures, table, json, bench_report_json, compiled_stats_json)
    measured = Performance(world.world_size * batch_size / median_s, median_s)
    least = getattr(context.current().arguments, "min_throughput", None)
    if isinstance(least, int | float) and measured.throughput < least:
        raise AssertionError(f"{measured.throughput:.1f} samples/s were measured, and --min-throughput is {least:g}")
    return measured


def _predicted_s(step: CompiledStep | None, *, forward_only: bool, graph_only: bool) -> float | None:
    """What the device takes for what is measured; None without a prediction."""
    if step is None:
        return None
    if forward_only:
        return step.of_kind_s(SectionKind.FWD) if graph_only else step.forward_s
    return step.graph_s if graph_only else step.scaled.predicted_s


def checked_kinds(
    program: Program, batch_size: int | None, n_iterations: int, *, inference: bool
) -> list[SectionKind] | None:
    """The section types of a step that is measured; None for all. Raises OptionError for what cannot be measured."""
    if batch_size not in (None, program.batch_size) and not _is_default(batch_size):
        raise OptionError(
            f"the batch size is {batch_size}, and the PEF was compiled for {program.batch_size}",
            remedy=f"-b {program.batch_size}, or compile again",
        )
    if n_iterations < 1:
        raise OptionError(f"{n_iterations} steps cannot be timed", remedy="--num-iterations 1 or more")
    return [SectionKind.FWD] if inference or program.training is None else None


def _is_default(batch_size: int | None) -> bool:
    """Whether this is -b of a command line without -b. Apps that do not use -b make batches of another size."""
    arguments = context.current().arguments
    return (
        isinstance(arguments, Arguments)
        and "batch_size" not in arguments.typed
        and batch_size == getattr(arguments, "batch_size", None)
    )


def timed_step(
    inputs: Inputs, kinds: list[SectionKind] | None, *, data_parallel: bool, reduce_on_rdu: bool
) -> Callable[[], float]:
    """A function that runs the sections of `kinds` once and returns the seconds. The rest is as for session.run."""

    def step() -> float:
        began_s = time.perf_counter()
        session.run(inputs, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu, section_types=kinds)
        return time.perf_counter() - began_s

    return step


def time_steps(step: Callable[[], float], n_iterations: int, min_duration: float) -> list[float]:
    """Collective. The seconds that each call of `step` returns, after WARM_UP_STEPS calls that do not count."""
    for _ in range(WARM_UP_STEPS):
        step()
    times_s = [step() for _ in range(n_iterations)]
    # All ranks take as many steps as the one that wants the most, for they take them together.
    more = max(context.communicator().all_gather_object(_steps_until(min_duration, times_s)))
    return times_s + [step() for _ in range(more)]


def spread(median_s: float, slow_s: float, steps: int) -> str:
    """The number of threads, how much the times of `steps` steps differ, and a likely reason."""
    threads = torch.get_num_threads()
    told = f"median, with {counted(threads, 'thread')} a replica; 9 of 10 steps took {format_seconds(slow_s)} or less"
    if steps < _FEW_STEPS or slow_s < _UNEVEN * median_s:
        return told
    alone = "" if threads == 1 else "; threads that wait for each other do the same: try --threads 1"
    return f"{told}\nnotice: steps differ much, as where other work is on these cores{alone}"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def median_and_slow(times_s: list[float]) -> tuple[float, float]:
    """The median and the 90th percentile."""
    return statistics.median(times_s), sorted(times_s)[math.ceil(0.9 * len(times_s)) - 1]


def title(replicas: int, steps: int) -> str:
    """The heading of a table."""
    return f"measured on this machine, {counted(replicas, 'replica')}, {counted(steps, 'step')}"


def report(
    figures: Mapping[str, JsonValue],
    table: str,
    json: str | None,
    bench_report_json: str | None,
    compiled_stats_json: str | None,
) -> None:
    """Rank 0 prints the figures, as one line of JSON or as `table`, and writes the files that were asked for."""
    if context.communicator().rank != 0:
        return
    for file in (json, bench_report_json):
        if file is not None and file != "-":
            write_json(file, figures)
    if compiled_stats_json is not None:
        write_json(compiled_stats_json, get_pef_info(_pef_of_this_process()))
    sys.stdout.write(f"{json_format.dumps(figures)}\n" if json == "-" else table)
    sys.stdout.flush()


def _pef_of_this_process() -> str:
    pef = getattr(context.current().arguments, "pef", None)
    if pef is None:
        raise OptionError(
            "compiled_stats_json is given, and this process was not given a --pef",
            remedy="parse_app_args reads it; or write utils.pef_utils.get_pef_info(pef) to the file",
        )
    return str(pef)


def _steps_until(duration_s: float, times_s: list[float]) -> int:
    """How many more steps fill `duration_s`, by those that were taken."""
    left_s = duration_s - sum(times_s)
    return max(0, round(left_s / statistics.median(times_s))) if left_s > 0 else 0
