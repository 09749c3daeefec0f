"""How long a PEF's step takes here: `measure_performance`, which is measured, and predicts nothing of a device."""

import json as json_format
import statistics
import sys
import time
from pathlib import Path

from torch import nn

from sambasim.errors import OptionError
from sambasim.ir.graph import SectionKind
from sambasim.samba import context
from sambasim.samba.request import Inputs
from sambasim.samba.session import session
from sambasim.units import format_seconds

WARM_UP_STEPS = 3


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
    data_parallel: bool = False,
    reduce_on_rdu: bool = False,
    **others: object,
) -> dict[str, float | int | str]:
    """Run the loaded PEF on `inputs` again and again, and tell how long a step takes on this machine. Collective.

    n_iterations: timed steps, after WARM_UP_STEPS that are not
    min_duration: seconds that the timed steps take at least; then there are more of them
    json: a file for the figures, or "-" for a line on stdout instead of the table
    data_parallel, reduce_on_rdu: as for session.run

    A training PEF is trained while it is measured; with `inference`, or an inference PEF, only its forward runs.
    `n_chips`, `run_graph_only` and other keywords of the vendor change nothing: every step here is the graph alone.
    Raises OptionError if no PEF is loaded for `model`, or for a batch size that is not the PEF's.
    """
    program = session.program(model)
    if batch_size != program.batch_size:
        raise OptionError(
            f"the batch size is {batch_size}, and the PEF was compiled for {program.batch_size}",
            remedy=f"-b {program.batch_size}, or compile again",
        )
    if n_iterations < 1:
        raise OptionError(f"{n_iterations} steps cannot be timed", remedy="--num-iterations 1 or more")
    kinds = [SectionKind.FWD] if inference or program.training is None else None

    def step() -> float:
        began_s = time.perf_counter()
        session.run(inputs, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu, section_types=kinds)
        return time.perf_counter() - began_s

    for _ in range(WARM_UP_STEPS):
        step()
    world = context.communicator()
    times_s = [step() for _ in range(n_iterations)]
    # All ranks take as many steps as the one that wants the most, for they take them together.
    more = max(world.all_gather_object(_steps_until(min_duration, times_s)))
    times_s += [step() for _ in range(more)]
    median_s = max(world.all_gather_object(statistics.median(times_s)))
    figures: dict[str, float | int | str] = {
        "measured": "on this machine, not on a device",
        "replicas": world.world_size,
        "batch_size": batch_size,
        "steps": len(times_s),
        "step_s": median_s,
        "samples_per_s": world.world_size * batch_size / median_s,
    }
    if world.rank == 0:
        _tell(figures, json)
    return figures


def _steps_until(duration_s: float, times_s: list[float]) -> int:
    """How many more steps fill `duration_s`, by those that were taken."""
    left_s = duration_s - sum(times_s)
    return max(0, round(left_s / statistics.median(times_s))) if left_s > 0 else 0


def _tell(figures: dict[str, float | int | str], json: str | None) -> None:
    line = json_format.dumps(figures)
    if json == "-":
        print(line, flush=True)
        return
    if json is not None:
        Path(json).write_text(f"{line}\n", encoding="utf-8")
    replicas, steps = figures["replicas"], figures["steps"]
    sys.stdout.write(
        f"measured on this machine, {replicas} {'replica' if replicas == 1 else 'replicas'}, {steps} steps: "
        f"{format_seconds(float(figures['step_s']))} a step, {float(figures['samples_per_s']):.0f} samples/s\n"
    )
    sys.stdout.flush()
