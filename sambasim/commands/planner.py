"""Plans: prices the strategies of a task by the device model, or with `--here` by what is measured on this machine."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from sambasim.commands.plan import PlanTask
from sambasim.commands.subject import OnPhase
from sambasim.commands.variants import OfDtypes, Variants, changes_of
from sambasim.compiler.front import captured_from_options
from sambasim.compiler.passes import Place
from sambasim.hardware.host import available_bytes
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions
from sambasim.simulation.planning.here import needed_bytes, plan_here, spaced
from sambasim.simulation.planning.search import Plan, Planner
from sambasim.simulation.planning.strategy import Strategy


def plan(task: PlanTask, on_phase: OnPhase, *, with_frontier: bool) -> Plan:
    """`with_frontier`: the frontier of time and memory is compiled and priced too."""
    options = task.options

    def capture(dtype: str) -> Variants:
        if task.program is not None:
            return Variants(task.program, options)
        return _captured(options, {"dtype": dtype}, on_phase)

    programs = OfDtypes(capture)
    programs.of(task.spaces[0].dtypes[0])  # its errors end the command
    if task.here:
        return _plan_this_machine(task, programs, on_phase)
    (space,) = task.spaces
    planner = Planner(programs, task.device, task.cluster, options.opt_level)
    with _without_collections():
        found = planner.plan(options.name, space, task.goal, on_phase=on_phase)
        if with_frontier:
            on_phase("compile and price the frontier of time and memory")
            found = planner.with_priced_frontier(found)
    return found


def options_of_best(plan: Plan, options: CompileOptions) -> CompileOptions:
    return options.model_copy(update=changes_of(plan.best[0].strategy, options))


def _captured(options: CompileOptions, changes: Mapping[str, object], on_phase: OnPhase) -> Variants:
    """A capture of the model with `changes` of `options`, before any strategy."""
    plain = {"n_chips": 1, "micro_batches": 1, "tensor_parallel": None}
    chosen = options.model_copy(update={**plain, **changes})
    program, model = captured_from_options(chosen, on_phase)
    return Variants(program, chosen, model)


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collections: a plan makes millions of objects, and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan_this_machine(task: PlanTask, programs: OfDtypes, on_phase: OnPhase) -> Plan:
    """Measure this machine, and predict all strategies on it. Raises MachineError if the model does not run here."""
    from sambasim.runtime.machine.launcher import mpirun_here
    from sambasim.runtime.machine.resources import cores_of_this_process
    from sambasim.runtime.measure.machine import Work, measure_machine

    options, spaces = task.options, task.spaces
    optimizer = cast("OptimizerOptions", options.optimizer)  # `plan_task` refuses None
    strategies = [strategy for space in spaces for strategy in space.strategies()]
    most, batch, (dtype,) = len(spaces), spaces[0].global_batch, spaces[0].dtypes
    cores = len(cores_of_this_process())
    of_samples: dict[int, Variants] = {}

    def work_for(count: int) -> Work:
        sizes = spaced({strategy.samples for strategy in strategies if min(strategy.ranks, cores) == count} or {1})
        if count > cores:  # one that has been captured
            sizes = [max((size for size in of_samples if size <= batch // count), default=min(of_samples))]
        passes = [whole(Strategy(count, samples=samples, dtype=dtype)) for samples in sizes]
        room_bytes = (available_bytes() or 0) // count
        fitting = [program for program in passes if needed_bytes(program) < room_bytes] or passes[:1]
        return Work(tuple(fitting), options.data, optimizer)

    def whole(strategy: Strategy) -> Program:
        if strategy.samples not in of_samples:
            size = {"batch_size": strategy.samples, "accumulation_steps": 1}
            changes = {"dtype": dtype, "training": options.training.model_copy(update=size)}
            of_samples[strategy.samples] = _captured(options, changes, on_phase)
        return Place()(of_samples[strategy.samples].program(strategy))

    machine = measure_machine(work_for, most, on_phase)
    on_phase("predict all strategies")
    return plan_here(options.name, programs.program, machine, spaces, task.goal, has_mpi=mpirun_here() is not None)
