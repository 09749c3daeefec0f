"""`sambasim plan --here`: what is measured on this machine, and which flags do not go with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from sambasim.cli import shared
from sambasim.cli.plan_subject import captured
from sambasim.units import counted

if TYPE_CHECKING:
    from sambasim.ir.program import Program
    from sambasim.options.compile import CompileOptions
    from sambasim.options.training import OptimizerOptions
    from sambasim.simulation.planning.search import Goal, Plan
    from sambasim.simulation.planning.strategy import Space, Strategy

_MOST_RANKS = 4


def check_place(
    subject: str, cluster: str | None, nodes: int | None, arch: str | None, ranks: int | None, *, here: bool
) -> None:
    """Raises OptionError for flags that do not go together, and for what --here cannot measure."""
    from sambasim.cli.prediction import is_model
    from sambasim.errors import OptionError

    if not here:
        if ranks is not None:
            raise OptionError("--ranks is for this machine", remedy="add --here, or give --nodes instead")
        return
    for flag, value in (("--cluster", cluster), ("--nodes", nodes), ("--arch", arch)):
        if value is not None:
            raise OptionError(f"{flag} is for devices, and --here plans for this machine", remedy=f"leave out {flag}")
    if not is_model(subject):
        raise OptionError(
            f"--here measures passes of several batch sizes, and a PEF as {subject} has one",
            remedy="plan the config or the model that it was compiled from",
        )


def spaces_here(
    options: "CompileOptions", ranks: int | None, global_batch: int | None, only: Mapping[str, Sequence[object]]
) -> "Sequence[Space]":
    """The strategies of 1, 2, … ranks. Raises OptionError if there are none, and for what --here cannot measure."""
    from sambasim.errors import OptionError
    from sambasim.runtime.capacity import cores_of_this_process
    from sambasim.runtime.measure.machine import mpirun_here
    from sambasim.simulation.planning.strategy import Space

    if options.optimizer is None:
        raise OptionError("a plan of steps needs an optimizer", remedy="--set optimizer.name=adamw")
    most = ranks or min(2 * len(cores_of_this_process()), _MOST_RANKS)
    most = most if mpirun_here() is not None else 1
    batch = global_batch or most * options.training.batch_size * options.training.accumulation_steps
    dtypes = tuple(map(str, only.get("dtype", (options.dtype,))))
    if len(dtypes) > 1:
        raise OptionError("--here measures passes of one dtype", remedy=f"--only dtype={dtypes[0]}")
    spaces = [Space(count, most, batch, dtypes, only=only) for count in range(1, most + 1)]
    if not any(True for space in spaces for _ in space.strategies()):
        what = f"no strategy of up to {counted(most, 'rank')} gives a global batch of {batch:,} with these values"
        raise OptionError(what, remedy="another --global-batch, or fewer --only")
    return spaces


def plan_this_machine(
    options: "CompileOptions",
    program_of: "Callable[[Strategy], Program]",
    spaces: "Sequence[Space]",
    goal: "Goal",
    report: Callable[[str], None],
) -> "Plan":
    """Measure this machine, and predict all strategies on it. Raises MachineError if the model does not run here."""
    from sambasim.simulation.planning.here import needed_bytes, plan_here, spaced
    from sambasim.simulation.planning.strategy import Strategy

    with shared.kept_imports():
        from sambasim.commands.variants import Variants
        from sambasim.compiler.passes import Place
        from sambasim.hardware.host import available_bytes
        from sambasim.runtime.capacity import cores_of_this_process
        from sambasim.runtime.measure.machine import measure_machine, mpirun_here
        from sambasim.runtime.measure.passes import Work

    optimizer = cast("OptimizerOptions", options.optimizer)  # `spaces_here` refuses None
    strategies = [one for space in spaces for one in space.strategies()]
    most, batch, (dtype,) = len(spaces), spaces[0].global_batch, spaces[0].dtypes
    cores = len(cores_of_this_process())
    of_samples: dict[int, Variants] = {}

    def work_for(count: int) -> Work:
        sizes = spaced({one.samples for one in strategies if min(one.ranks, cores) == count} or {1})
        if count > cores:  # one that has been captured
            sizes = [max((one for one in of_samples if one <= batch // count), default=min(of_samples))]
        found = [whole(Strategy(count, samples=samples, dtype=dtype)) for samples in sizes]
        room_bytes = (available_bytes() or 0) // count
        fitting = [one for one in found if needed_bytes(one) < room_bytes] or found[:1]
        return Work(tuple(fitting), options.data, optimizer)

    def whole(strategy: Strategy) -> "Program":
        if strategy.samples not in of_samples:
            size = {"batch_size": strategy.samples, "accumulation_steps": 1}
            changes = {"dtype": dtype, "training": options.training.model_copy(update=size)}
            of_samples[strategy.samples] = captured(options, changes, report)
        return Place()(of_samples[strategy.samples].program(strategy))

    machine = measure_machine(work_for, most, report)
    report("predict all strategies")
    return plan_here(options.name, program_of, machine, spaces, goal, has_mpi=mpirun_here() is not None)
