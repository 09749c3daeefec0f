"""What `simulate`, `tilestat` and `report` ask about a subject, and what is predicted for it."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sambasim.bounded import LARGEST_COUNT, shortened
from sambasim.commands.subject import OnPhase, Subject, is_model, level_of, subject_of_model, subject_of_pef
from sambasim.errors import MachineError, OptionError, PefError
from sambasim.hardware.spec import ALIASES, ClusterSpec, DeviceSpec, load_cluster, load_device
from sambasim.ir.mesh import copy_mesh
from sambasim.ir.program import Program
from sambasim.pef import locate
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.simulation.advice import what_fits
from sambasim.simulation.prediction import Prediction, predict
from sambasim.simulation.step import has_several_ranks
from sambasim.simulation.sync import SyncPath


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments of a command that predicts. None or empty means: as compiled, and the default replicas."""

    subject: str
    output_folder: Path
    overrides: Sequence[str] = ()
    arch: str | None = None
    num_tiles: int | None = None
    level: str | None = None
    batch_sizes: Sequence[int] = ()
    replicas: Sequence[int] = ()
    sync: Sequence[SyncPath] = tuple(SyncPath)
    cluster: str | None = None


def predicted(question: Question, on_phase: OnPhase, *, one_device: bool = False) -> list[Prediction]:
    """For each batch size. With `one_device`, a copy of the model must have one rank. Raises OptionError for invalid
    arguments, if possible before the capture of a model."""
    device, cluster, subject = _resolved(question, on_phase)
    for _, program in subject.programs:
        if one_device:
            _check_one_device(program, question.subject)
        elif program.ranks_of_replica > 1:
            _check_as_compiled(question, program)
    with _pef_errors(question.subject):
        return [_predicted(question, device, cluster, subject, size, program) for size, program in subject.programs]


def _check_one_device(program: Program, name: str) -> None:
    if has_several_ranks(program):
        mesh = copy_mesh(program.mesh)
        raise OptionError(
            f"this is a prediction for one device, and a replica of {program.name} has {mesh.world_size} ranks "
            f"({mesh})",
            remedy=f"sambasim simulate {shlex.quote(name)} predicts all of its ranks",
        )


def _resolved(question: Question, on_phase: OnPhase) -> tuple[DeviceSpec, ClusterSpec, Subject]:
    device = load_device(question.arch) if question.arch else None
    cluster = load_cluster(question.cluster) if question.cluster else None
    subject = _subject(question, on_phase)
    device = device or load_device(subject.arch)
    return device, cluster or load_cluster(device.cluster), subject


def _predicted(
    question: Question, device: DeviceSpec, cluster: ClusterSpec, subject: Subject, size: int, program: Program
) -> Prediction:
    """Raises MachineError if the program does not fit; of replicas of one rank, with what would fit."""
    tiles, level = _tiles(question, subject), level_of(question.level or subject.level)
    replicas, samples, micro_steps = question.replicas, size, subject.micro_steps
    if program.ranks_of_replica > 1:  # a model was captured for its batch size, and a PEF has one
        samples = program.batch_size
        replicas = replicas if several_replicas(program, replicas) else (1,)
    try:
        return predict(program, device, tiles, level, cluster, replicas, batch_size=samples, micro_steps=micro_steps)
    except MachineError as error:
        if program.ranks_of_replica > 1:
            raise
        recomputed = None if subject.recomputed is None else subject.recomputed(size)
        fits = what_fits(program, device, tiles, level, size, micro_steps, recomputed)
        if not fits:
            raise
        from sambasim.report.advice import fitting_text

        raise MachineError(error.what, where=error.where, remedy=fitting_text(fits)) from error


def _check_as_compiled(question: Question, program: Program) -> None:
    """Raises OptionError for what is predicted of replicas of one rank only."""
    name, what = question.subject, f"a replica of {program.name} has {program.ranks_of_replica} ranks, and is predicted"
    if question.level:
        remedy = (
            f"--set compile.opt_level={question.level}" if is_model(name) else f"compile it with --{question.level}"
        )
        raise OptionError(f"{what} with its sections as compiled", remedy=remedy)
    if question.batch_sizes and not is_model(name):
        sizes = ",".join(map(str, question.batch_sizes))
        remedy = f"sambasim simulate CONFIG.toml -b {sizes}, which captures the model for each batch size"
        raise OptionError(f"{what} from a PEF at the batch size of the PEF", remedy=remedy)
    if program.training is None:
        raise OptionError(
            f"the PEF {program.name} is for inference, and only training is predicted on several ranks",
            remedy="compile it for training, or without --tensor-parallel",
        )


def several_replicas(program: Program, asked: Sequence[int]) -> bool:
    """Whether a run of `program` may have several replicas. Raises OptionError if it may not, and some are `asked`."""
    several = any(axis.at_run_time for axis in program.mesh)
    if not several and set(asked) - {1}:
        what = f"the PEF {program.name} has one replica: it has no REDUCE and GATHER sections"
        raise OptionError(what, remedy="compile it with --data-parallel, or leave out --replicas")
    return several


@contextmanager
def _pef_errors(name: str) -> Iterator[None]:
    """Turn errors in the pricing of a PEF into PefError: reading a PEF checks only the form of arguments, as rule 25
    needs PyTorch."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if is_model(name):
            raise
        what = f"{name} has a node with arguments that its operator does not take: {type(error).__name__}: {error}"
        raise PefError(what, where="pef.json", remedy=COMPILE_AGAIN) from error


def _tiles(question: Question, subject: Subject) -> int | None:
    if question.num_tiles is not None:
        return question.num_tiles
    asked, own = (ALIASES.get(name, name) for name in (question.arch or subject.arch, subject.arch))
    return subject.tiles if asked == own else None


def _subject(question: Question, on_phase: OnPhase) -> Subject:
    name = question.subject
    if is_model(name):
        return subject_of_model(name, question.overrides, question.batch_sizes, on_phase)
    if question.overrides:
        raise OptionError(f"--set changes a config, and {name} is a PEF", remedy=f"sambasim simulate {name}")
    return subject_of_pef(locate(name, question.output_folder), question.batch_sizes)


def counts(asked: str | int | Sequence[int] | None, flag: str, most: int = LARGEST_COUNT) -> tuple[int, ...]:
    """The numbers in `1,2,4`, which come from `flag`; none for None. Raises OptionError."""
    if asked is None:
        return ()
    text = asked if isinstance(asked, str) else ",".join(map(str, [asked] if isinstance(asked, int) else asked))
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > most:
        raise OptionError(f"{flag} {shortened(text)}: must be whole numbers from 1 to {most:,}", remedy=f"{flag} 1,2,4")
    return numbers


def paths(text: str) -> tuple[SyncPath, ...]:
    known = {path.value: path for path in SyncPath}
    asked = [part.strip() for part in text.split(",")]
    if unknown := [part for part in asked if part not in known]:
        raise OptionError(f"--sync {text}: there is no path {unknown[0]!r}", remedy="--sync host, rdu, or host,rdu")
    return tuple(dict.fromkeys(known[part] for part in asked))
