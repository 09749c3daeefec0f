"""What `simulate`, `tilestat` and `report` ask about a subject, and what is predicted for it."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sambasim.bounded import shortened
from sambasim.commands.subject import OnPhase, Subject, is_model, level_of, subject_of_model, subject_of_pef
from sambasim.errors import MachineError, OptionError, PefError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import ALIASES, ClusterSpec, DeviceSpec, load_cluster, load_device
from sambasim.ir.mesh import copy_mesh
from sambasim.ir.program import Program
from sambasim.options.flags import LARGEST_COUNT
from sambasim.pef import locate
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.simulation.advice import what_fits
from sambasim.simulation.mesh import MeshStep, has_several_ranks, mesh_step
from sambasim.simulation.prediction import Prediction, placements, predict
from sambasim.simulation.ranks import price_ranks
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


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is predicted for a subject, for each batch size: a prediction of one device and its replicas, or, if a
    replica has several ranks, the steps of each number of replicas, by each path if there is something to sync."""

    device: DeviceSpec
    alone: Sequence[Prediction] = ()
    meshes: Sequence[Sequence[MeshStep]] = ()


def predicted(question: Question, on_phase: OnPhase) -> Predicted:
    """Raises OptionError for invalid arguments, if possible before the capture of a model."""
    device, cluster, subject = _resolved(question, on_phase)
    with _pef_errors(question.subject):
        if all(program.ranks_of_replica == 1 for _, program in subject.programs):
            return Predicted(device, alone=_of_one_rank(question, device, cluster, subject))
        steps = [_of_mesh(question, device, cluster, subject, program) for _, program in subject.programs]
        return Predicted(device, meshes=steps)


def predictions(question: Question, on_phase: OnPhase) -> list[Prediction]:
    """For each batch size, one device of the first replica, and all replicas if they have one rank. Raises OptionError
    for invalid arguments, if possible before the capture of a model."""
    device, cluster, subject = _resolved(question, on_phase)
    for _, program in subject.programs:
        if has_several_ranks(program):
            mesh = copy_mesh(program.mesh)
            raise OptionError(
                f"this is a prediction for one device, and a replica of {program.name} has {mesh.world_size} ranks "
                f"({mesh})",
                remedy=f"sambasim simulate {shlex.quote(question.subject)} predicts all of its ranks",
            )
    with _pef_errors(question.subject):
        return _of_one_rank(question, device, cluster, subject)


def _resolved(question: Question, on_phase: OnPhase) -> tuple[DeviceSpec, ClusterSpec, Subject]:
    device = load_device(question.arch) if question.arch else None
    cluster = load_cluster(question.cluster) if question.cluster else None
    subject = _subject(question, on_phase)
    device = device or load_device(subject.arch)
    return device, cluster or load_cluster(device.cluster), subject


def _of_one_rank(question: Question, device: DeviceSpec, cluster: ClusterSpec, subject: Subject) -> list[Prediction]:
    return [_or_what_fits(question, device, cluster, subject, size, program) for size, program in subject.programs]


def _or_what_fits(
    question: Question, device: DeviceSpec, cluster: ClusterSpec, subject: Subject, size: int, program: Program
) -> Prediction:
    """Raises MachineError, with what would fit, if the program does not."""
    tiles, level = _tiles(question, subject), level_of(question.level or subject.level)
    micro_steps = subject.micro_steps
    try:
        return predict(
            program, device, tiles, level, cluster, question.replicas, batch_size=size, micro_steps=micro_steps
        )
    except MachineError as error:
        recomputed = None if subject.recomputed is None else subject.recomputed(size)
        fits = what_fits(program, device, tiles, level, size, micro_steps, recomputed)
        if not fits:
            raise
        from sambasim.report.advice import fitting_text

        raise MachineError(error.what, where=error.where, remedy=fitting_text(fits)) from error


def _of_mesh(
    question: Question,
    device: DeviceSpec,
    cluster: ClusterSpec,
    subject: Subject,
    program: Program,
) -> list[MeshStep]:
    """Raises OptionError for what is not as compiled, and for replicas that do not fit on the cluster."""
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
    tiles, calibration = _tiles(question, subject), load_calibration()
    several = several_replicas(program, question.replicas)
    places = placements(device, tiles, cluster, question.replicas if several else (1,), ranks=program.ranks_of_replica)
    priced = price_ranks(program, budget_of(device, calibration, tiles), calibration)
    return [
        mesh_step(program, priced, placement, path, subject.micro_steps)
        for placement in places
        for path in question.sync[: None if placement.replicas * program.chips > program.ranks_of_replica else 1]
    ]


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
