"""What `sambasim plan` plans: a config, a model or a PEF, as options and the programs of its strategies;
and with `--here`, what is measured on this machine."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sambasim.cli import shared
from sambasim.cli.terminal import phases
from sambasim.units import counted

if TYPE_CHECKING:
    from sambasim.commands.variants import OfDtypes, Variants
    from sambasim.ir.program import Program
    from sambasim.options.compile import CompileOptions
    from sambasim.options.training import OptimizerOptions
    from sambasim.simulation.planning.search import Goal, Plan
    from sambasim.simulation.planning.strategy import Space, Strategy


def subject_of(
    subject: str, overrides: Sequence[str], output_folder: Path, arch: str | None
) -> "tuple[CompileOptions, Program | None]":
    """The options of SUBJECT for `arch`, and the program if it is a PEF. Raises OptionError."""
    from sambasim.cli.prediction import is_model, refuse_script
    from sambasim.options.compile import compile_options

    if is_model(subject):
        config, target = (Path(subject), None) if subject.endswith(".toml") else (None, subject)
        options, program = compile_options(config, target, overrides, {}), None
    else:
        refuse_script(subject)
        options, program = _pef(subject, overrides, output_folder)
    return options.model_copy(update={"arch": arch or options.arch}), program


def _pef(subject: str, overrides: Sequence[str], output_folder: Path) -> "tuple[CompileOptions, Program]":
    from sambasim.errors import OptionError
    from sambasim.options.compile import BuildOptions, ParallelOptions, options_in_python
    from sambasim.pef import locate, read

    if overrides:
        raise OptionError(f"--set changes a config, and {subject} is a PEF", remedy=f"sambasim plan {subject}")
    document = read(locate(subject, output_folder))
    program, compiled = document.program, document.compile_options
    if program.ranks_of_replica > 1:
        raise OptionError(
            f"a replica of {program.name} has {program.ranks_of_replica} ranks already, and a plan begins with one",
            remedy="plan the config or the model that it was compiled from",
        )
    if compiled.get("recompute") != "none":
        raise OptionError(f"{program.name} recomputes activations", remedy="plan the config or the model")
    tables: dict[str, object] = {"data": document.data_source, "model": compiled.get("model")}
    tables |= {name: value for name, value in document.training_defaults.items() if value is not None}
    for table, kind in (("compile", BuildOptions), ("parallel", ParallelOptions)):
        tables[table] = {name: compiled[name] for name in kind.model_fields if name in compiled}
    return options_in_python(tables, {}), program


def check_subject(
    options: "CompileOptions", only: Mapping[str, Sequence[object]], *, emitted: bool, of_pef: bool
) -> None:
    """Raises OptionError for what cannot be planned, or, if it is to be `emitted`, for what no config can say."""
    from typing import get_args

    from sambasim.errors import OptionError
    from sambasim.options.compile import BuildOptions

    if options.inference:
        raise OptionError("a plan is for training, and this is for inference", remedy="leave out inference")
    if of_pef and (others := [one for one in only.get("dtype", ()) if one != options.dtype]):
        raise OptionError(
            f"--only dtype={others[0]}: the PEF is {options.dtype}",
            remedy=f"--only dtype={options.dtype}, or plan the config or the model",
        )
    known = get_args(BuildOptions.model_fields["arch"].annotation)
    if emitted and options.arch not in known:
        what = f"--emit writes a config, and a config compiles for {', '.join(known)}, not {options.arch}"
        raise OptionError(what, remedy="leave out --emit, or give one of them as --arch")
    if emitted and options.model.target is None:
        what = "--emit writes a config, and this PEF was compiled in Python or by an app: it names no model"
        raise OptionError(what, remedy="leave out --emit")


def programs_of(
    options: "CompileOptions", program: "Program | None", only: Mapping[str, Sequence[object]], *, quiet: bool
) -> "OfDtypes":
    """The programs of all strategies, from `program`, or else from one capture for each dtype. The first is made
    now: its errors end the command."""
    with shared.kept_imports():
        from sambasim.commands.variants import OfDtypes, Variants

    def capture(dtype: str) -> Variants:
        if program is not None:
            return Variants(program, options)
        with phases(quiet=quiet) as report:
            return captured(options, {"dtype": dtype}, report)

    programs = OfDtypes(capture)
    programs.of(str(next(iter(only.get("dtype", ())), options.dtype)))
    return programs


def captured(options: "CompileOptions", changes: Mapping[str, object], report: Callable[[str], None]) -> "Variants":
    """A capture of the model with `changes` of `options`, before any strategy."""
    with shared.kept_imports():
        from sambasim.commands.variants import Variants
        from sambasim.compiler.front import captured_from_options

    plain = {"n_chips": 1, "micro_batches": 1, "tensor_parallel": None}
    chosen = options.model_copy(update={**plain, **changes})
    program, model = captured_from_options(chosen, report)
    return Variants(program, chosen, model)


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
    from sambasim.runtime.machine.resources import cores_of_this_process
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
        from sambasim.runtime.machine.resources import cores_of_this_process
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
