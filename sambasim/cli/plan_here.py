"""`sambasim plan --here`: what is measured on this machine, and which flags do not go with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sambasim.cli import shared
from sambasim.units import counted

if TYPE_CHECKING:
    from sambasim.ir.program import Program
    from sambasim.options.compile import CompileOptions
    from sambasim.simulation.planning.search import Goal, Plan
    from sambasim.simulation.planning.strategy import Strategy

PLAIN = {"n_chips": 1, "micro_batches": 1, "tensor_parallel": None}
"""Options of a model before any strategy."""

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


def plan_this_machine(
    options: "CompileOptions",
    program_of: "Callable[[Strategy], Program]",
    ranks: int | None,
    global_batch: int | None,
    only: Mapping[str, Sequence[object]],
    goal: "Goal",
    report: Callable[[str], None],
) -> "Plan":
    """Measure this machine, and predict all strategies on it. Raises MachineError if the model does not run here."""
    from sambasim.errors import OptionError
    from sambasim.simulation.planning.here import needed_bytes, plan_here, spaced
    from sambasim.simulation.planning.strategy import Space, Strategy

    optimizer = options.optimizer
    if optimizer is None:
        raise OptionError("a plan of steps needs an optimizer", remedy="--set optimizer.name=adamw")
    with shared.kept_imports():
        from sambasim.compiler.front import captured_from_options
        from sambasim.compiler.passes import Place
        from sambasim.compiler.variants import Variants
        from sambasim.hardware.host import available_bytes
        from sambasim.runtime.capacity import cores_of_this_process
        from sambasim.runtime.measure.machine import measure_machine, mpirun_here
        from sambasim.runtime.measure.passes import Work

    has_mpi = mpirun_here() is not None
    most = (ranks or min(2 * len(cores_of_this_process()), _MOST_RANKS)) if has_mpi else 1
    batch = global_batch or most * options.training.batch_size * options.training.accumulation_steps
    dtypes = tuple(map(str, only.get("dtype", (options.dtype,))))
    if len(dtypes) > 1:
        raise OptionError("--here measures passes of one dtype", remedy=f"--only dtype={dtypes[0]}")
    spaces = [Space(count, most, batch, dtypes, only=only) for count in range(1, most + 1)]
    strategies = [one for space in spaces for one in space.strategies()]
    if not strategies:
        what = f"no strategy of up to {counted(most, 'rank')} gives a global batch of {batch:,} with these values"
        raise OptionError(what, remedy="another --global-batch, or fewer --only")
    cores = len(cores_of_this_process())
    of_samples: dict[int, Variants] = {}

    def work_for(count: int) -> Work:
        sizes = spaced({one.samples for one in strategies if min(one.ranks, cores) == count} or {1})
        if count > cores:  # one that has been captured
            sizes = [max((one for one in of_samples if one <= batch // count), default=min(of_samples))]
        found = [whole(Strategy(count, samples=samples, dtype=dtypes[0])) for samples in sizes]
        room_bytes = (available_bytes() or 0) // count
        fitting = [one for one in found if needed_bytes(one) < room_bytes] or found[:1]
        return Work(tuple(fitting), options.data, optimizer)

    def whole(strategy: Strategy) -> "Program":
        if strategy.samples not in of_samples:
            size = {"batch_size": strategy.samples, "accumulation_steps": 1}
            of_size = options.model_copy(
                update={**PLAIN, "dtype": dtypes[0], "training": options.training.model_copy(update=size)}
            )
            captured, model = captured_from_options(of_size, report)
            of_samples[strategy.samples] = Variants(captured, of_size, model)
        return Place()(of_samples[strategy.samples].program(strategy))

    machine = measure_machine(work_for, most, report)
    report("predict all strategies")
    return plan_here(options.name, program_of, machine, spaces, goal, has_mpi=has_mpi)
