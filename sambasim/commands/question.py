"""What a command is about, a PEF or a model, and what is predicted for it. A model is captured without memory."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sambasim.bounded import LARGEST_COUNT, MOST_MICRO_STEPS, MOST_REPLICAS, shortened
from sambasim.costs.cut import Level
from sambasim.errors import MachineError, OptionError, PefError
from sambasim.hardware.spec import ALIASES, arch_of, load_cluster, load_device
from sambasim.ir.mesh import copy_mesh
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.options.given import read_toml
from sambasim.pef import locate, read
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.simulation.advice import what_fits
from sambasim.simulation.prediction import Prediction, predict
from sambasim.simulation.step import has_several_ranks
from sambasim.simulation.sync import SyncPath

OnPhase: TypeAlias = Callable[[str], None]

DEFAULT_OPTIMIZER = "adamw"
"""That of an estimate of memory."""


def is_model(name: str) -> bool:
    """Whether `name` is a config or a model, and no PEF. Raises OptionError for a Python file alone."""
    if name.endswith(".py"):
        what = f"{name} is a Python file, and the name of a model in it is missing"
        remedy = f"{name}:NAME, for a class or function of that file; for an app, the PEF that it compiles"
        raise OptionError(what, remedy=remedy)
    return name.endswith(".toml") or ":" in name


def options_of_model(name: str, overrides: Sequence[str], **flags: object) -> CompileOptions:
    """The options of a config or a model. Raises OptionError."""
    config, target = (Path(name), None) if name.endswith(".toml") else (None, name)
    return compile_options(config, target, overrides, flags)


def options_of_estimate(subject: str, overrides: Sequence[str], batch_size: int | None) -> CompileOptions:
    """Raises OptionError for a PEF, for inference, and for a replica of several ranks."""
    if not is_model(subject):
        remedy = f"file.py:NAME, module:NAME or FILE.toml; for a PEF: sambasim inspect {subject}"
        raise OptionError(f"{subject} is neither a model nor a config", remedy=remedy)
    flags: dict[str, object] = {"batch_size": batch_size}
    in_config = subject.endswith(".toml") and "optimizer" in read_toml(Path(subject))
    if not in_config and not any(override.startswith("optimizer.name") for override in overrides):
        flags["optimizer"] = DEFAULT_OPTIMIZER
    if options_of_model(subject, [*overrides, "parallel.zero=1"], **flags).inference:
        what = "the estimate is for training, and compile.inference is true"
        raise OptionError(what, remedy="--set compile.inference=false")
    options = options_of_model(subject, overrides, **flags, data_parallel=True)
    for field, others in (("n_chips", "tensor_parallel="), ("pipeline_stages", "micro_batches=1")):
        if (count := getattr(options, field)) > 1:
            what = f"parallel.{field} = {count}: the estimate is for a replica of one rank"
            raise OptionError(what, remedy=f"--set parallel.{field}=1 --set parallel.{others}")
    return options


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments of a command that predicts. None or empty means: as compiled, and the default replicas."""

    subject: str
    output_folder: Path = Path("out")
    overrides: Sequence[str] = ()
    arch: str | None = None
    num_tiles: int | None = None
    level: str | None = None
    batch_sizes: Sequence[int] = ()
    replicas: Sequence[int] = ()
    sync: Sequence[SyncPath] = tuple(SyncPath)
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class _Subject:
    """A program for each requested batch size, and how it was compiled. If a program has another batch size, its work
    is scaled. `recomputed` captures a model again, with recomputation."""

    programs: Sequence[tuple[int, Program]]
    arch: str
    tiles: int | None
    level: Level
    micro_steps: int
    recomputed: Callable[[int], Program] | None = None


def predicted(question: Question, on_phase: OnPhase, *, one_device: bool = False) -> list[Prediction]:
    """For each batch size. With `one_device`, a copy of the model must have one rank. Raises OptionError for invalid
    arguments, if possible before the capture of a model; MachineError for what does not fit, with what would; PefError
    for arguments that its operators do not take: reading a PEF checks only their form, as rule 25 needs PyTorch."""
    device = load_device(question.arch) if question.arch else None
    cluster = load_cluster(question.cluster) if question.cluster else None
    name = question.subject
    if is_model(name):
        subject = _of_model(question, on_phase)
    elif question.overrides:
        raise OptionError(f"--set changes a config, and {name} is a PEF", remedy=f"sambasim simulate {name}")
    else:
        subject = _of_pef(question)
    device = device or load_device(subject.arch)
    cluster = cluster or load_cluster(device.cluster)
    for _, program in subject.programs:
        if one_device and has_several_ranks(program):
            mesh = copy_mesh(program.mesh)
            raise OptionError(
                f"this is a prediction for one device, and a replica of {program.name} has {mesh.world_size} ranks "
                f"({mesh})",
                remedy=f"sambasim simulate {shlex.quote(name)} predicts all of its ranks",
            )
        if not one_device and program.ranks_of_replica > 1:
            _check_as_compiled(question, program)
    asked, own = (ALIASES.get(arch, arch) for arch in (question.arch or subject.arch, subject.arch))
    tiles = question.num_tiles
    if tiles is None and asked == own:
        tiles = subject.tiles
    level, steps = _level_of(question.level or subject.level), subject.micro_steps
    predictions = []
    with _pef_errors(name):
        for size, program in subject.programs:
            replicas, samples = question.replicas, size
            if program.ranks_of_replica > 1:  # a model was captured for its batch size, and a PEF has one
                samples = program.batch_size
                replicas = replicas if several_replicas(program, replicas) else (1,)
            try:
                predictions.append(
                    predict(program, device, tiles, level, cluster, replicas, batch_size=samples, micro_steps=steps)
                )
            except MachineError as error:
                if program.ranks_of_replica > 1:
                    raise
                recomputed = None if subject.recomputed is None else subject.recomputed(size)
                fits = what_fits(program, device, tiles, level, size, steps, recomputed)
                if not fits:
                    raise
                from sambasim.report.advice import fitting_text

                raise MachineError(error.what, where=error.where, remedy=fitting_text(fits)) from error
    return predictions


def _check_as_compiled(question: Question, program: Program) -> None:
    """Raises OptionError for what is predicted of replicas of one rank only."""
    name, level = question.subject, question.level
    what = f"a replica of {program.name} has {program.ranks_of_replica} ranks, and is predicted"
    if level:
        remedy = f"--set compile.opt_level={level}" if is_model(name) else f"compile it with --{level}"
        raise OptionError(f"{what} with its sections as compiled", remedy=remedy)
    if question.batch_sizes and not is_model(name):
        sizes = ",".join(map(str, question.batch_sizes))
        remedy = f"sambasim simulate CONFIG.toml -b {sizes}, which captures the model for each batch size"
        raise OptionError(f"{what} from a PEF at the batch size of the PEF", remedy=remedy)
    if program.training is None:
        what = f"the PEF {program.name} is for inference, and only training is predicted on several ranks"
        raise OptionError(what, remedy="compile it for training, or without --tensor-parallel")


def several_replicas(program: Program, asked: Sequence[int]) -> bool:
    """Whether a run of `program` may have several replicas. Raises OptionError if it may not, and some are `asked`."""
    several = any(axis.at_run_time for axis in program.mesh)
    if not several and set(asked) - {1}:
        what = f"the PEF {program.name} has one replica: it has no REDUCE and GATHER sections"
        raise OptionError(what, remedy="compile it with --data-parallel, or leave out --replicas")
    return several


@contextmanager
def _pef_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if is_model(name):
            raise
        what = f"{name} has a node with arguments that its operator does not take: {type(error).__name__}: {error}"
        raise PefError(what, where="pef.json", remedy=COMPILE_AGAIN) from error


def _of_pef(question: Question) -> _Subject:
    document = read(locate(question.subject, question.output_folder))
    program, compiled = document.program, document.compile_options
    programs = [(size, program) for size in question.batch_sizes or (program.batch_size,)]
    tiles, level = compiled.get("num_tiles"), _level_of(compiled.get("opt_level"))
    training = document.training_defaults.get("training")
    steps = training.get("accumulation_steps") if program.training and isinstance(training, dict) else None
    if steps is None:
        steps = 1
    if type(steps) is not int or not 1 <= steps <= MOST_MICRO_STEPS:
        quoted = shortened(ascii(steps))
        what = f"the PEF accumulates {quoted} micro-steps in a step; the most is {MOST_MICRO_STEPS:,}"
        raise PefError(what, where="training.accumulation_steps of the PEF", remedy=COMPILE_AGAIN)
    return _Subject(programs, arch_of(compiled), tiles if isinstance(tiles, int) else None, level, steps)


def _of_model(question: Question, on_phase: OnPhase) -> _Subject:
    def options_at(size: int | None) -> CompileOptions:
        return options_of_model(question.subject, question.overrides, batch_size=size, data_parallel=True)

    options = [options_at(size) for size in question.batch_sizes or (None,)]
    first = options[0]

    from sambasim.compiler.front import shapes_from_options  # torch

    def recomputed(size: int) -> Program:
        on_phase("capture it again with recomputation")
        return shapes_from_options(options_at(size).model_copy(update={"recompute": "full"}))

    programs = [(each.training.batch_size, shapes_from_options(each, on_phase)) for each in options]
    again = recomputed if first.recompute == "none" and not first.inference else None
    steps = first.training.accumulation_steps
    return _Subject(programs, first.arch, first.num_tiles, first.opt_level, steps, again)


def _level_of(stored: object) -> Level:
    match stored:
        case "o0" | "o1":
            return stored
        case _:
            return "o3"


_Numbers: TypeAlias = str | int | Sequence[int] | None


def question_of(
    subject: str,
    *,
    replicas: _Numbers = None,
    batch_sizes: _Numbers = None,
    sync: str = "host,rdu",
    names: Sequence[str] = ("--replicas", "--batch-size"),
    **others: Any,
) -> Question:
    """What is asked about `subject`, by a user who calls the numbers `names`. Raises OptionError."""
    sizes, numbers = _counts(batch_sizes, names[1], LARGEST_COUNT), _counts(replicas, names[0], MOST_REPLICAS)
    known = {path.value: path for path in SyncPath}
    asked = [part.strip() for part in sync.split(",")]
    if unknown := [part for part in asked if part not in known]:
        raise OptionError(f"--sync {sync}: there is no path {unknown[0]!r}", remedy="--sync host, rdu, or host,rdu")
    paths = tuple(dict.fromkeys(known[part] for part in asked))
    return Question(subject, replicas=numbers, batch_sizes=sizes, sync=paths, **others)


def _counts(asked: _Numbers, name: str, most: int) -> tuple[int, ...]:
    """The numbers in `1,2,4`; none for None. Raises OptionError."""
    if asked is None:
        return ()
    text = asked if isinstance(asked, str) else ",".join(map(str, [asked] if isinstance(asked, int) else asked))
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > most:
        raise OptionError(f"{name} {shortened(text)}: must be whole numbers from 1 to {most:,}", remedy=f"{name} 1,2,4")
    return numbers
