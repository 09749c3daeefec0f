"""`measure_performance` and `measure_sections`: times of a step, and of each section, on this machine.

The time predicted for the device of the PEF is printed beside it, with its source.
"""

import json as json_format
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import nn

from sambasim.errors import OptionError
from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.graph import SectionKind
from sambasim.samba import ending, process
from sambasim.samba.inputs import Inputs
from sambasim.samba.notices import checks_keywords, say_once
from sambasim.samba.session import session
from sambasim.samba.test import write_json
from sambasim.samba.utils.parser import get_pef_info
from sambasim.units import counted, format_seconds

_WARM_UP_STEPS = 3
_WIDTH = 200  # of the table, whatever has the output: mpirun, a file
_FEW_STEPS = 10
_UNEVEN = 2.0
"""From _FEW_STEPS steps on, a notice is printed if the 90th percentile is at least this multiple of the median."""


class Performance(NamedTuple):
    """`throughput` in samples/s of all replicas, `latency` in seconds a step."""

    throughput: float
    latency: float


@checks_keywords()
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

    inference: run the forward only; otherwise the steps train the model
    run_graph_only: a step is the sum of its sections, one after another, without copies of inputs and checks
    min_duration: seconds; more than `n_iterations` steps are timed until they have taken so long
    json: a file for the figures, or "-" to print them as JSON instead of the table
    bench_report_json, compiled_stats_json: files for the figures, and for the output of `sambasim inspect --json`

    No effect: n_chips (the PEF decides), world_size, use_sambaloader, set_output_grads, json_counters. Raises
    OptionError as `_Repeated`; AssertionError if --min-throughput is not reached."""
    if json_counters is not None:
        say_once("json_counters", "there is no device that counts")
    repeated = _Repeated(model, inputs, batch_size, n_iterations, inference, data_parallel, reduce_on_rdu)

    def graph_alone() -> float:
        with session.timed(model) as clock:
            repeated.step()
        return sum(clock.passes[-1].values())

    times_s = repeated.times_s(graph_alone if run_graph_only else repeated.step, n_iterations, min_duration)
    median_s, slow_s, spread = repeated.typical(times_s)
    throughput = repeated.world.world_size * repeated.program.batch_size / median_s
    lines = [f"{repeated.title(len(times_s))}: {format_seconds(median_s)} a step, {throughput:.0f} samples/s", spread]
    predicted_s = repeated.predicted_s(graph_only=run_graph_only)
    if predicted_s is not None:
        lines.append(f"predicted for a device: {format_seconds(predicted_s)} a step")
    figures: dict[str, JsonValue] = {"step_s": median_s, "step_p90_s": slow_s, "samples_per_s": throughput}
    figures["predicted_step_s"] = predicted_s
    repeated.report(len(times_s), figures, lines, json, bench_report_json, compiled_stats_json)
    least = process.current().flag("min_throughput")
    if isinstance(least, int | float) and throughput < least:
        raise AssertionError(f"{throughput:.1f} samples/s were measured, and --min-throughput is {least:g}")
    return Performance(throughput, median_s)


@checks_keywords()
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
    """Runs the loaded PEF on `inputs` repeatedly, and prints how long each of its sections takes. Collective. The
    arguments are those of `measure_performance`; `run_graph_only` and `num_sections` have no effect. Sections run one
    after another, without overlap, so their sum can exceed a step; sections that run as one pass have one row. With one
    replica, REDUCE and GATHER are not predicted; without `reduce_on_rdu`, REDUCE includes GATHER.

    Returns all figures. In each row of `sections`, measured_s is the median over steps on this machine, of the slowest
    replica; predicted_s is on the device, by the model of `sambasim simulate`, or None without a prediction."""
    from sambasim.report.tables import Tables, table  # it takes long to import

    repeated = _Repeated(model, inputs, batch_size, n_iterations, inference, data_parallel, reduce_on_rdu)
    with session.timed(model) as clock:
        steps = len(repeated.times_s(repeated.step, n_iterations, min_duration))
    passes = clock.passes[_WARM_UP_STEPS:]
    medians = [statistics.median(times) for times in zip(*(times.values() for times in passes), strict=True)]
    _, slow_s, spread = repeated.typical([sum(times.values()) for times in passes])
    predicted = repeated.predicted
    by_section_s = {} if predicted is None else predicted.by_section_s(repeated.program.leading.sections)
    rows: list[Any] = []
    for sections, measured_s in zip(passes[0], repeated.slowest(medians), strict=True):
        indices = [section.index for section in sections]
        kind = "+".join(dict.fromkeys(section.kind.value for section in sections))
        name = " … ".join(dict.fromkeys((sections[0].name, sections[-1].name)))
        row = {"sections": indices, "kind": kind, "name": name, "measured_s": measured_s}
        rows.append({**row, "predicted_s": _sum_of_known(map(by_section_s.get, indices))})
    sums = {time: _sum_of_known(row[time] for row in rows) for time in ("measured_s", "predicted_s")}
    figures: dict[str, JsonValue] = {"sections_s": sums["measured_s"], "predicted_sections_s": sums["predicted_s"]}
    figures |= {"step_p90_s": slow_s, "sections": rows}
    every = [{**row, "sections": "-".join(dict.fromkeys(str(row["sections"][at]) for at in (0, -1)))} for row in rows]
    every.append({"sections": "all", "kind": "", "name": "", **sums})
    shown = table(repeated.title(steps), every, "sections:section, kind, name", "measured_s, predicted_s")
    lines = [Tables([shown], every).text(_WIDTH), spread]
    return repeated.report(steps, figures, lines, json, bench_report_json, compiled_stats_json)


class _Repeated:
    """The step of the loaded PEF that is repeated, and what is predicted of it. Raises OptionError if no PEF is loaded
    for the model, for another batch size than the PEF's, and for less than one step."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        batch_size: int | None,
        n_iterations: int,
        inference: bool,
        data_parallel: bool,
        reduce_on_rdu: bool,
    ) -> None:
        # The device model takes long to import, and most runs do without.
        from sambasim.runtime.prediction import predicted, predicted_record
        from sambasim.simulation.sync import SyncPath

        machine = session.loaded(model).machine
        document, self.program = machine.document, machine.program
        # The default of -b has no effect: an app may ignore -b, so that its batches have another size.
        flag = process.current().flag
        is_default = flag("parser") and "batch_size" not in flag("parser").typed and batch_size == flag("batch_size")
        if batch_size not in (None, self.program.batch_size) and not is_default:
            what = f"the batch size is {batch_size}, and the PEF was compiled for {self.program.batch_size}"
            raise OptionError(what, remedy=f"-b {self.program.batch_size}, or compile again")
        if n_iterations < 1:
            raise OptionError(f"{n_iterations} steps cannot be timed", remedy="--num-iterations 1 or more")
        self.world = world = ending.communicator()
        self._forward_only = inference or self.program.training is None
        kinds = [SectionKind.FWD] if self._forward_only else None
        run = partial(session.run, inputs, section_types=kinds)
        self._run = partial(run, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
        inventory = inventory_of(document.compile_options)
        nodes = world.node_of if data_parallel else [world.node_index]
        placement = place_replicas(inventory, nodes, document.program.ranks_of_replica)
        step = predicted(document.program, inventory, placement, SyncPath.RDU if reduce_on_rdu else SyncPath.HOST)
        if isinstance(step, str):
            self.predicted, self._source = None, f"no prediction for a device: {step}"
            self._figures: dict[str, JsonValue] = {"not_predicted": step}
        else:
            record = predicted_record(step, inventory)
            device, backing = record.predicted_for, record.predicted_backed_by
            self.predicted, self._source = step, f"predicted: for {device}; {backing}"
            self._figures = {"predicted_for": device, "predicted_backed_by": backing}

    def predicted_s(self, *, graph_only: bool) -> float | None:
        step = self.predicted
        if step is None:
            return None
        if self._forward_only:
            return step.of_kind_s(SectionKind.FWD) if graph_only else step.forward_s
        return step.graph_s if graph_only else step.predicted_s

    def step(self) -> float:
        """Runs it once and returns the seconds."""
        began_s = time.perf_counter()
        self._run()
        return time.perf_counter() - began_s

    def times_s(self, step: Callable[[], float], n_iterations: int, min_duration: float) -> list[float]:
        """The seconds that each call of `step` returns, after warm-up calls. Collective."""
        for _ in range(_WARM_UP_STEPS):
            step()
        times_s = [step() for _ in range(n_iterations)]
        # Steps are collective, so all ranks take the most that one of them needs.
        left_s = max(0.0, min_duration - sum(times_s))
        missing = self.world.all_gather_object(round(left_s / statistics.median(times_s)))
        return times_s + [step() for _ in range(max(missing))]

    def slowest(self, times_s: Sequence[float]) -> list[float]:
        """Each of the times on the rank where it is the longest. Collective."""
        return list(map(max, zip(*self.world.all_gather_object(times_s), strict=True)))

    def typical(self, times_s: Sequence[float]) -> tuple[float, float, str]:
        """The median and the 90th percentile of the slowest replica; and in words the number of threads, how much the
        times differ, and a likely reason. Collective."""
        percentile_s = sorted(times_s)[math.ceil(0.9 * len(times_s)) - 1]
        median_s, slow_s = self.slowest([statistics.median(times_s), percentile_s])
        threads = torch.get_num_threads()
        words = f"median, with {counted(threads, 'thread')} a replica; "
        words += f"9 of 10 steps took {format_seconds(slow_s)} or less"
        if len(times_s) >= _FEW_STEPS and slow_s >= _UNEVEN * median_s:
            alone = "" if threads == 1 else "; or threads wait for each other: try --threads 1"
            words += f"\nnotice: times of steps differ much: other work may run on these cores{alone}"
        return median_s, slow_s, words

    def title(self, steps: int) -> str:
        return f"measured on this machine, {counted(self.world.world_size, 'replica')}, {counted(steps, 'step')}"

    def report(
        self, steps: int, measured: Mapping[str, JsonValue], lines: Sequence[str], *files: str | None
    ) -> dict[str, JsonValue]:
        """All figures. Rank 0 prints them, as one line of JSON or as `lines`, and writes `files`, the arguments json,
        bench_report_json and compiled_stats_json."""
        figures: dict[str, JsonValue] = {"measured": "on this machine, not on a device"}
        figures |= {"replicas": self.world.world_size, "batch_size": self.program.batch_size, "steps": steps}
        figures |= {"threads": torch.get_num_threads(), **measured, **self._figures}
        if self.world.rank == 0:
            json, bench_report, compiled_stats = files
            for file in (json, bench_report):
                if file is not None and file != "-":
                    write_json(file, figures)
            if compiled_stats is not None:
                write_json(compiled_stats, get_pef_info(str(process.current().flag("pef"))))
            print(json_format.dumps(figures) if json == "-" else "\n".join([*lines, self._source]), flush=True)
        return figures


def _sum_of_known(times_s: Iterable[float | None]) -> float | None:
    known = [time_s for time_s in times_s if time_s is not None]
    return sum(known) if known else None
